#!/bin/sh
# Ranks on the GPUs of this machine: the same bits on 1 and N, resuming with other numbers of ranks, kill -9 of a rank, and gdn of 400M
# parameters on one GPU (plain, and as a world of one rank) and on N. Every result is printed as it comes and kept as a line of
# OUT/ranks.jsonl; the table is printed last.
#   bench/ranks_gpu.sh MNEME OUT [GPUS] [SECONDS]
# MNEME_NCCL names libnccl.so.2 where the system does not find it.
set -u
[ $# -ge 2 ] || { echo "usage: bench/ranks_gpu.sh MNEME OUT [GPUS] [SECONDS]" >&2; exit 2; }
mneme=$1 out=$2 gpus=${3:-2} limit=${4:-360}
began=$(date +%s)
mkdir -p "$out"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
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

# small RANKS OUT [settings...]: RANKS 0: without --ranks
small() {
    ranks=$1 to=$2
    shift 2
    n="--ranks $ranks"
    [ "$ranks" = 0 ] && n=
    # shellcheck disable=SC2086
    timeout -k 5 60 "$mneme" train $n --device "${device:-cuda}" --quiet --set "data.train=$folder/book.txt" --set model.layers="${layers:-gdn}" \
        --set model.hidden_size=256 --set model.num_hidden_layers=4 --set train.batch=4 --set train.context=256 --set train.accumulate=8 \
        --set train.steps=6 --set train.log_every=1 --set train.warmup=2 --set train.checkpoint_every=3 --set train.keep_every=3 \
        --set train.tensorboard=false --set "out=$folder/$to" "$@" > "$folder/$to.txt" 2>&1 ||
        { tail -n 5 "$folder/$to.txt"; tell "small run $to" failed; return 1; }
}
losses() { sed -n 's/.*"loss":\([^,]*\),"lr".*/\1/p' "$folder/$1/metrics.jsonl"; }
same() { cmp "$folder/$1/last/model.safetensors" "$folder/$2/last/model.safetensors" && [ "$(losses "$1")" = "$(losses "$2")" ]; }

for dtype in f32 bf16; do
    small 1 "one.$dtype" --set train.dtype=$dtype
    small "$gpus" "many.$dtype" --set train.dtype=$dtype
    verdict "$dtype: $gpus GPUs give the bits of one" same "one.$dtype" "many.$dtype"
    tell "$dtype: last loss" "$(losses "many.$dtype" | tail -n 1)" nats
done
small 0 plain && tell "f32: last loss without --ranks" "$(losses plain | tail -n 1)" nats
device=cpu small 1 host && tell "f32: last loss on the CPU" "$(losses host | tail -n 1)" nats

# resuming from step 3 with the other number of ranks
resume() { # RANKS FROM
    cp -r "$folder/$2" "$folder/again.$1"
    timeout -k 5 60 "$mneme" train --resume "$folder/again.$1/checkpoints/step-00000003" --ranks "$1" --device cuda --quiet > "$folder/again.$1.txt" 2>&1 ||
        { tail -n 5 "$folder/again.$1.txt"; return 1; }
}
resume 1 many.f32
verdict "checkpoint of $gpus goes on with 1, same bits" same many.f32 again.1
resume "$gpus" one.f32
verdict "checkpoint of 1 goes on with $gpus, same bits" same one.f32 "again.$gpus"

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

# large OUT RANKS ACCUMULATE STEPS: gdn of 400M parameters in the background
large() {
    n="--ranks $2"
    [ "$2" = 0 ] && n=
    # shellcheck disable=SC2086
    "$mneme" train $n --device cuda --set "data.train=$folder/tokens.bin" --set data.format=nanogpt --set data.valid_part=0 --set "model.layers=${layers:-gdn}" \
        --set model.num_heads=4 --set model.head_dim=256 --set model.expand_v=1 --set model.num_hidden_layers=24 --set model.hidden_size=1024 \
        --set model.intermediate_size=2816 --set model.mlp=swiglu --set model.vocab_size=32000 --set model.tie_word_embeddings=false \
        --set train.batch=8 --set train.context=4096 --set "train.accumulate=$3" --set "train.steps=$4" --set train.warmup=10 --set train.lr=3e-4 \
        --set train.dtype=bf16 --set train.recompute=light --set train.log_every=1 --set train.eval_every=0 --set train.checkpoint_every=0 \
        --set train.tensorboard=false --set "out=$folder/$1" > "$folder/$1.txt" 2>&1 &
    run=$!
}
lines() { grep -c '"loss"' "$folder/$1/metrics.jsonl" 2> /dev/null || true; }
middle() { sort -g | awk '{ v[NR] = $1 } END { if (NR) print v[int((NR + 1) / 2)] }'; }
# speed OUT RANKS ACCUMULATE: tokens a second, the median of steps 7 to 16
speed() {
    [ "$(left)" -gt 60 ] || { tell "$1" skipped; return; }
    large "$1" "$2" "$3" 100000
    tries=0
    while [ "$(lines "$1")" -lt 16 ] 2> /dev/null && kill -0 $run 2> /dev/null && [ $tries -lt 600 ]; do sleep 0.1; tries=$((tries + 1)); done
    used=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | tr '\n' ' ')
    rate=$(sed -n 's/.*"tokens_per_second":\([^,]*\),.*/\1/p' "$folder/$1/metrics.jsonl" | sed -n '7,16p' | middle)
    tell "$1: tokens/s" "${rate:-none}"
    tell "$1: memory in use on each GPU" "$used" MiB
    grep -h "^memory" "$folder/$1.txt" | sed 's/^/    /'
    sed -n 's/.*\("compute_seconds":[^}]*\).*/    \1/p' "$folder/$1/metrics.jsonl" | sed -n '10,12p'
    if [ "$2" -gt 1 ]; then kill_one "$1" 1 $run
    else kill -9 $run; fi
    wait $run 2> /dev/null
    [ -n "$rate" ] || tail -n 3 "$folder/$1.txt"
    eval "rate_$2=\${rate:-0}"
}
speed plain.400m 0 1
speed world1.400m 1 1
speed many.400m "$gpus" "$gpus"
tell "world of one against plain" "$(awk -v a="${rate_1:-0}" -v b="${rate_0:-0}" 'BEGIN { if (b > 0) printf "%.4f", a / b }')" times
eval "rate_many=\${rate_$gpus:-0}"
tell "$gpus GPUs against one" "$(awk -v a="$rate_many" -v b="${rate_0:-0}" 'BEGIN { if (b > 0) printf "%.3f", a / b }')" times

# the same bits of the large model: three steps, with the same global batch
whole() {
    large "$1" "$2" "$3" 3
    tries=0
    while kill -0 $run 2> /dev/null && [ $tries -lt 900 ]; do sleep 0.1; tries=$((tries + 1)); done
    kill -9 $run 2> /dev/null
    wait $run 2> /dev/null
}
if [ "$(left)" -gt 100 ]; then
    whole one.bits 1 "$gpus"
    whole many.bits "$gpus" "$gpus"
    verdict "400M, bf16: $gpus GPUs give the bits of one" same one.bits many.bits
    tell "400M: bytes of moments each rank saved" "$(stat -c %s "$folder"/many.bits/last/optimizer-*.safetensors 2> /dev/null | tr '\n' ' ')"
fi
echo
sed 's/{"name": "\(.*\)", "value": "\(.*\)", "unit": "\(.*\)"}/| \1 | \2 \3 |/' "$result"
