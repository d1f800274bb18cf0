#!/bin/sh
# Ranks on the GPUs of this machine. Every result is printed as it comes and kept as a line of OUT/ranks.jsonl; the table is printed last.
#   bench/ranks_gpu.sh MNEME OUT [GPUS] [SECONDS] [PARTS]
# PARTS, by default all, in this order: "small" the same bits on 1, 2, 4 .. GPUs, resuming with other numbers of ranks, kill -9 of a rank, sequences in parts;
# "speed" gdn of 400M parameters, plain, as a world of one rank, and on 2, 4 .. GPUs; "long" one sequence of 131,072 tokens; "bits" three steps
# of the large model. By name only: "world" plain and a world of one rank in turns; "paths" what a world of one does, shards and all, and its bits;
# "zero" shards of gradients, their bits, memory and rate; "parameters" the same of parameters; "cut" sequences of attention in parts. MNEME_NCCL names libnccl.so.2 where the system does not find it.
set -u
[ $# -ge 2 ] || { echo "usage: bench/ranks_gpu.sh MNEME OUT [GPUS] [SECONDS]" >&2; exit 2; }
mneme=$1 out=$2 gpus=${3:-2} limit=${4:-360} parts=${5:-small speed long bits}
began=$(date +%s)
mkdir -p "$out"
folder=$(mktemp -d)
run=
finish() {
    [ -n "$run" ] && kill -9 "$run" 2> /dev/null
    rm -rf "$folder"
}
trap finish EXIT
trap 'exit 1' INT TERM
result=$out/ranks.jsonl
: > "$result"

left() { echo $((limit - $(date +%s) + began)); }
# tell NAME VALUE UNIT: of a measure or, with the value "yes" or "no", of a check
tell() {
    printf '{"name": "%s", "value": "%s", "unit": "%s"}\n' "$1" "$2" "${3:-}" >> "$result"
    printf '[%4ss] %-52s %s %s\n' "$(($(date +%s) - began))" "$1" "$2" "${3:-}"
}
verdict() { # NAME COMMAND...: yes where the command goes well
    name=$1
    shift
    if "$@" > /dev/null 2>&1; then tell "$name" yes; else tell "$name" no; fi
}
python3 - "$folder" <<'END'
import random, sys
random.seed(3)
open(sys.argv[1] + "/book.txt", "w").write(" ".join(random.choice(["the", "cat", "sat", "on", "a", "mat"]) for _ in range(60000)))
import array
array.array("H", (min(int(random.expovariate(1 / 3000)), 31999) for _ in range(3 << 20))).tofile(open(sys.argv[1] + "/tokens.bin", "wb"))
END

counts=    # of GPUs: 2, 4 ..
n=2
while [ "$n" -le "$gpus" ]; do
    counts="$counts $n"
    n=$((2 * n))
done

# small RANKS OUT [settings...]: RANKS 0: without --ranks
small() {
    ranks=$1 to=$2
    shift 2
    start="--ranks $ranks"
    [ "$ranks" = 0 ] && start=
    # shellcheck disable=SC2086
    timeout -k 5 60 "$mneme" train $start --device "${device:-cuda}" --quiet --set "data.train=$folder/book.txt" --set model.layers="${layers:-gdn}" \
        --set model.hidden_size=256 --set model.num_hidden_layers=4 --set train.batch=4 --set train.context=256 --set train.accumulate=8 \
        --set train.steps=6 --set train.log_every=1 --set train.warmup=2 --set train.checkpoint_every=3 --set train.keep_every=3 \
        --set train.tensorboard=false --set "out=$folder/$to" "$@" > "$folder/$to.txt" 2>&1 ||
        { tail -n 5 "$folder/$to.txt"; tell "small run $to" failed; return 1; }
}
losses() { sed -n 's/.*"loss":\([^,]*\),"lr".*/\1/p' "$folder/$1/metrics.jsonl"; }
same() { cmp "$folder/$1/last/model.safetensors" "$folder/$2/last/model.safetensors" && [ "$(losses "$1")" = "$(losses "$2")" ]; }

bits() {
    for dtype in f32 bf16; do
        small 1 "one.$dtype" --set train.dtype=$dtype
        for n in $counts; do
            small "$n" "$n.$dtype" --set train.dtype=$dtype
            verdict "$dtype: $n GPUs give the bits of one" same "one.$dtype" "$n.$dtype"
        done
        tell "$dtype: last loss" "$(losses "one.$dtype" | tail -n 1)" nats
    done
    small 0 plain && tell "f32: last loss without --ranks" "$(losses plain | tail -n 1)" nats
    (device=cpu && small 1 host) && tell "f32: last loss on the CPU" "$(losses host | tail -n 1)" nats
}

# resume RANKS FROM: from step 3 with another number of ranks
resume() {
    cp -r "$folder/$2" "$folder/again.$1"
    timeout -k 5 60 "$mneme" train --resume "$folder/again.$1/checkpoints/step-00000003" --ranks "$1" --device cuda --quiet > "$folder/again.$1.txt" 2>&1 ||
        { tail -n 5 "$folder/again.$1.txt"; return 1; }
}
resumes() {
    for n in $counts; do
        rm -rf "$folder/again.1" "$folder/again.$n"
        resume 1 "$n.f32"
        verdict "checkpoint of $n goes on with 1, same bits" same "$n.f32" again.1
        resume "$n" one.f32
        verdict "checkpoint of 1 goes on with $n, same bits" same one.f32 "again.$n"
    done
}

# kill_one OUT VICTIM PID: seconds until all processes of the launcher PID have ended, and what was said
kill_one() {
    victim=$(pgrep -P "$3" | sed -n "$(($2 + 1))p")
    from=$(date +%s%N)
    kill -9 "$victim"
    tries=0
    while kill -0 "$3" 2> /dev/null && [ $tries -lt 300 ]; do sleep 0.1; tries=$((tries + 1)); done
    tell "$1: kill -9 of rank $2, the others ended after" "$(awk -v a="$from" -v b="$(date +%s%N)" 'BEGIN { printf "%.1f", (b - a) * 1e-9 }')" s
    kill -9 "$3" 2> /dev/null
    grep -h "rank [0-9]* stops\|was ended" "$folder/$1.txt" | sed 's/^/    /'
}
die() {
    "$mneme" train --ranks "$gpus" --device cuda --quiet --set "data.train=$folder/book.txt" --set model.layers=gdn --set model.hidden_size=256 \
        --set train.batch=4 --set train.context=256 --set train.accumulate=8 --set train.steps=100000 --set train.checkpoint_every=20 \
        --set train.eval_every=0 --set train.eval_batches=1 --set train.tensorboard=false --set "out=$folder/dead" > "$folder/dead.txt" 2>&1 &
    run=$!
    tries=0
    while [ ! -e "$folder/dead/last" ] && [ $tries -lt 300 ]; do sleep 0.1; tries=$((tries + 1)); done
    kill_one dead 1 $run
    step=$(readlink "$folder/dead/last" | sed 's/.*step-0*//')
    verdict "the last checkpoint of the killed run goes on" timeout -k 5 60 "$mneme" train --resume "$folder/dead" --ranks 1 --device cuda --quiet \
        --set "train.steps=$((${step:-0} + 2))"
}

# the sequences of small runs in parts: the same losses within rounding
sequences() {
    for layers in gdn kla; do
        small 1 "whole.$layers" --set train.accumulate=2
        losses "whole.$layers" > "$folder/a"
        for n in $counts; do
            small "$n" "parts.$layers.$n" --set train.accumulate=2 --set "train.sequence_ranks=$n"
            losses "parts.$layers.$n" > "$folder/b"
            tell "$layers: largest difference of losses, sequences in $n parts" "$(paste "$folder/a" "$folder/b" |
                awk 'NF == 2 { d = $1 - $2; if (d < 0) d = -d; if (d > m) m = d; n++ } END { if (n) printf "%.2g of %d steps", m, n }')"
        done
    done
    unset layers
}
part_small() {
    bits
    [ -n "$counts" ] || return 0
    resumes
    die
    sequences
}

# large OUT RANKS LAYERS STEPS [settings...]: 400M parameters in bf16, in the background
large() {
    to=$1 start="--ranks $2" last=$4
    [ "$2" = 0 ] && start=
    case $3 in
    gdn) shape="--set model.num_heads=4 --set model.head_dim=256 --set model.expand_v=1" ;;
    kla) shape="--set model.expand=1" ;;
    esac
    kind=$3
    shift 4
    # shellcheck disable=SC2086
    "$mneme" train $start --device cuda --set "data.train=$folder/tokens.bin" --set data.format=nanogpt --set data.valid_part=0 --set "model.layers=$kind" \
        $shape --set model.num_hidden_layers=24 --set model.hidden_size=1024 --set model.intermediate_size=2816 --set model.mlp=swiglu \
        --set model.vocab_size=32000 --set model.tie_word_embeddings=false --set "train.steps=$last" --set train.warmup=10 --set train.lr=3e-4 \
        --set train.dtype=bf16 --set train.log_every=1 --set train.eval_every=0 --set train.checkpoint_every=0 --set train.tensorboard=false \
        --set "out=$folder/$to" "$@" > "$folder/$to.txt" 2>&1 &
    run=$!
}
lines() { grep -c '"loss"' "$folder/$1/metrics.jsonl" 2> /dev/null || true; }
middle() { sort -g | awk '{ v[NR] = $1 } END { if (NR) print v[int((NR + 1) / 2)] }'; }
# speed OUT RANKS LAYERS STEPS SECONDS [settings...]: $rate: tokens a second, the median of the steps behind the first 5
speed() {
    rate=
    [ "$(left)" -gt 30 ] && [ "$2" -le "$gpus" ] || { tell "$1" skipped; return; }
    name=$1 ranks=$2 kind=$3 steps=$4 most=$5
    shift 5
    large "$name" "$ranks" "$kind" 100000 "$@"
    tries=0
    while [ "$(lines "$name")" -lt "$steps" ] 2> /dev/null || [ ! -e "$folder/$name/metrics.jsonl" ]; do
        kill -0 $run 2> /dev/null && [ $tries -lt $((10 * most)) ] || break
        sleep 0.1
        tries=$((tries + 1))
    done
    used=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits 2> /dev/null | tr '\n' ' ')
    rate=$(sed -n 's/.*"tokens_per_second":\([^,]*\),.*/\1/p' "$folder/$name/metrics.jsonl" 2> /dev/null | sed -n "6,${steps}p" | middle)
    tell "$name: tokens/s" "${rate:-none}"
    tell "$name: memory in use on each GPU" "$used" MiB
    grep -h "^memory" "$folder/$name.txt" | sed 's/^/    /'
    [ "$ranks" -gt 1 ] && sed -n 's/.*\("compute_seconds":[^}]*\).*/    \1/p' "$folder/$name/metrics.jsonl" | tail -n 2
    [ -n "$rate" ] || tail -n 4 "$folder/$name.txt"
    if [ "$ranks" -gt 1 ]; then kill_one "$name" 1 $run; else kill -9 $run; fi
    wait $run 2> /dev/null
    rm -rf "${folder:?}/$name"
}
ratio() { tell "$1" "$(awk -v a="${2:-0}" -v b="${3:-0}" 'BEGIN { if (b > 0) printf "%.4f", a / b }')" times; }
whole="--set train.batch=8 --set train.context=4096 --set train.recompute=light"
one="--set train.batch=1 --set train.context=131072 --set train.recompute=layer"
# shellcheck disable=SC2086
part_speed() {
    speed plain.400m 0 gdn 40 60 $whole --set train.accumulate=1
    plain=$rate
    for n in $counts; do
        speed "$n.400m" "$n" gdn 40 60 $whole --set "train.accumulate=$n"
        ratio "gdn 400M, 8 x 4096 a GPU: $n GPUs against one" "$rate" "$plain"
    done
    speed world1.400m 1 gdn 40 60 $whole --set train.accumulate=1
    ratio "gdn 400M: a world of one against plain" "$rate" "$plain"
}
# shellcheck disable=SC2086
part_long() {
    for which in gdn kla; do
        speed "$which.131072.one" 0 $which 12 60 $one
        plain=$rate
        for n in $counts; do
            speed "$which.131072.$n" "$n" $which 12 60 $one --set "train.sequence_ranks=$n"
            ratio "$which, one sequence of 131,072 tokens: $n GPUs against one" "$rate" "$plain"
        done
    done
}

# the same bits of the large model: three steps, with the same global batch
three() {
    # shellcheck disable=SC2086
    large "$1" "$2" gdn 3 $whole --set train.accumulate=2
    tries=0
    while kill -0 $run 2> /dev/null && [ $tries -lt 600 ]; do sleep 0.1; tries=$((tries + 1)); done
    kill -9 $run 2> /dev/null
    wait $run 2> /dev/null
}
part_bits() {
    [ -n "$counts" ] && [ "$(left)" -gt 45 ] || return 0
    three one.bits 1
    three 2.bits 2
    verdict "gdn 400M, bf16: 2 GPUs give the bits of one" same one.bits 2.bits
    tell "gdn 400M: bytes of moments in each rank's file" "$(stat -L -c %s "$folder"/2.bits/last/optimizer-*.safetensors 2> /dev/null | tr '\n' ' ')"
    tell "gdn 400M: bytes of moments of one rank" "$(stat -L -c %s "$folder"/one.bits/last/optimizer.safetensors 2> /dev/null)"
}
# plain runs and worlds of one in turns, on the same GPU: the ratio of the medians
# shellcheck disable=SC2086
part_world() {
    : > "$folder/plain.rates"
    : > "$folder/world.rates"
    for turn in 1 2; do
        speed "plain.$turn" 0 gdn 25 40 $whole --set train.accumulate=1
        echo "${rate:-0}" >> "$folder/plain.rates"
        speed "world.$turn" 1 gdn 25 40 $whole --set train.accumulate=1
        echo "${rate:-0}" >> "$folder/world.rates"
    done
    ratio "gdn 400M: a world of one against plain, in turns" "$(middle < "$folder/world.rates")" "$(middle < "$folder/plain.rates")"
}

# memory and rate of the large model with shards of moments, then of these as well; so many batches a rank
# shellcheck disable=SC2086
speeds_of_shards() {
    for n in $counts; do
        for shard in optimizer "$1"; do
            speed "$n.400m.$shard" "$n" gdn 12 40 $whole --set "train.accumulate=$(($2 * n))" --set "train.shard=$shard"
        done
    done
}

# shards of gradients: the bits of one rank; memory and rate of the large model with four batches a rank
# shellcheck disable=SC2086
part_zero() {
    for dtype in f32 bf16; do
        small 1 "zero.one.$dtype" --set train.dtype=$dtype
        for n in $counts; do
            small "$n" "zero.$n.$dtype" --set train.dtype=$dtype --set train.shard=gradients
            verdict "$dtype: $n GPUs with shards of gradients give the bits of one" same "zero.one.$dtype" "zero.$n.$dtype"
        done
    done
    speeds_of_shards gradients 4
}

# shards of parameters: the same, with evaluations and checkpoints between steps, for which all values come
# shellcheck disable=SC2086
part_parameters() {
    for case in gdn/bf16 "kla, attention/f32"; do
        layers=${case%/*} dtype=${case#*/}
        rm -rf "$folder"/param.*
        small 1 param.one --set "train.dtype=$dtype" --set train.eval_every=2 --set train.eval_batches=2
        for n in $counts; do
            small "$n" "param.$n" --set "train.dtype=$dtype" --set train.eval_every=2 --set train.eval_batches=2 --set train.shard=parameters
            verdict "$layers, $dtype: $n GPUs with shards of parameters give the bits of one" same param.one "param.$n"
        done
    done
    unset layers
    speeds_of_shards parameters 1
}

# a world of one goes the ways of more ranks: all shards, sequences in one part; the bits of a world of one without
part_paths() {
    small 1 paths.one
    for how in shard=gradients shard=parameters sequence_states=maps; do
        small 1 paths --set "train.$how"
        verdict "a world of one, train.$how: the bits of train.shard=optimizer" same paths.one paths
        rm -rf "$folder/paths"
    done
    small 0 paths.plain
    losses paths.one > "$folder/a"
    losses paths.plain > "$folder/b"
    tell "a world of one and a plain run: largest difference of losses" "$(paste "$folder/a" "$folder/b" |
        awk 'NF == 2 { d = $1 - $2; if (d < 0) d = -d; if (d > m) m = d; n++ } END { if (n) printf "%.2g of %d steps", m, n }')"
}

# what is cut by keys: the losses of one GPU within rounding
part_cut() {
    for case in attention/f32 attention/bf16 "gdn, attention/f32" hyperglu/f32; do
        layers=${case%/*} dtype=${case#*/}
        small 1 whole.cut --set train.accumulate=2 --set "train.dtype=$dtype"
        losses whole.cut > "$folder/a"
        for n in $counts; do
            rm -rf "$folder/parts.cut"
            small "$n" parts.cut --set train.accumulate=2 --set "train.sequence_ranks=$n" --set "train.dtype=$dtype"
            losses parts.cut > "$folder/b"
            tell "$layers, $dtype: largest difference of losses, sequences in $n parts" "$(paste "$folder/a" "$folder/b" |
                awk 'NF == 2 { d = $1 - $2; if (d < 0) d = -d; if (d > m) m = d; n++ } END { if (n) printf "%.2g of %d steps", m, n }')"
        done
        rm -rf "$folder/whole.cut"
    done
    unset layers
}
for part in $parts; do "part_$part"; done
echo
sed 's/{"name": "\(.*\)", "value": "\(.*\)", "unit": "\(.*\)"}/| \1 | \2 \3 |/' "$result"
