#!/bin/sh
# Ranks as hosts of their own: network namespaces on a bridge, with delay and loss between them. The bits of one rank; a
# network that parts while they train stops all of them with a sentence.
#   namespaces.sh MNEME SOURCE_DIR [LINK]
# LINK (support/programs/network_link.c) delays and loses where the kernel has no netem.
set -eu
mneme=$1 link=${3:-}
[ "$(id -u)" = 0 ] || { echo "skipped: network namespaces need root"; exit 77; }
command -v ip > /dev/null && command -v tc > /dev/null || { echo "skipped: ip and tc (iproute2) are not installed"; exit 77; }
tag=mn$$
how="with 2 ms of delay and 1 % of loss"
ip netns add "$tag"0 2> /dev/null || { echo "skipped: this machine makes no network namespaces"; exit 77; }
. "$2/tests/support/temporary.sh"
folder=$(mktemp -d)
linking=
clean() {
    [ -z "$linking" ] || kill "$linking" 2> /dev/null || true
    for r in 0 1 2; do ip netns del "$tag$r" 2> /dev/null || true; done
    ip netns del "${tag}b" 2> /dev/null || true
    rm -rf "$folder"
}
trap 'umount "$folder/disk" 2> /dev/null || true; clean' EXIT INT TERM
cd "$folder"
fail() {
    echo "namespaces: $*" >&2
    exit 1
}
skip() {
    echo "skipped: $*"
    exit 77
}
ip netns add "$tag"1
ip netns add "$tag"2
ip netns add "${tag}b"
netem=yes
ip netns exec "$tag"0 tc qdisc add dev lo root netem delay 2ms 2> /dev/null || netem=
if [ -n "$netem" ] || [ -z "$link" ]; then
    ip -n "${tag}b" link add br0 type bridge 2> /dev/null || skip "no bridges here"
    ip -n "${tag}b" link set br0 up
fi
[ -z "$netem" ] || ip netns exec "$tag"0 tc qdisc del dev lo root
for r in 0 1 2; do
    ip -n "${tag}b" link add "v$r" type veth peer name eth0 netns "$tag$r" 2> /dev/null || skip "no veth here"
    ip -n "${tag}b" link set "v$r" up
    if [ -n "$netem" ] || [ -z "$link" ]; then ip -n "${tag}b" link set "v$r" master br0; fi
    ip -n "$tag$r" addr add "10.77.0.$((r + 1))/24" dev eth0
    ip -n "$tag$r" link set eth0 up
    ip -n "$tag$r" link set lo up
    [ -z "$netem" ] || ip netns exec "$tag$r" tc qdisc add dev eth0 root netem delay 2ms loss 1%
done
if [ -z "$netem" ] && [ -n "$link" ]; then
    ip netns exec "${tag}b" "$link" 0.002 0.01 v0 v1 v2 &
    linking=$!
elif [ -z "$netem" ]; then
    how="as they are: no netem here"
fi
awk 'BEGIN { srand(3); for (i = 0; i < 3000; i++) printf "%s ", substr("thecatsatonamatandabirdsang", 1 + int(24 * rand()), 3) }' > book.txt
config="--threads 1 --quiet --set data.train=book.txt --set model.layers=gdn --set model.hidden_size=64 --set train.batch=2
    --set train.accumulate=6 --set train.context=32 --set train.tensorboard=false"
export WORLD_SIZE=3 MASTER_ADDR=10.77.0.1 MASTER_PORT=29400 MNEME_TOKEN=between-hosts
# shellcheck disable=SC2086
start() {
    out=$1
    shift
    for r in 0 1 2; do
        RANK=$r LOCAL_RANK=0 timeout 600 ip netns exec "$tag$r" "$mneme" train $config --set "out=$out" "$@" > "$(basename "$out")$r.txt" 2>&1 &
        eval "pid$r=$!"
    done
}
# shellcheck disable=SC2086
env -u WORLD_SIZE "$mneme" train $config --set train.steps=4 --set out=one > one.txt 2>&1
for shard in optimizer gradients parameters; do
    rm -rf hosts
    started=$(date +%s)
    start hosts --set train.steps=4 --set "train.shard=$shard"
    for r in 0 1 2; do
        eval "wait \$pid$r" || { cat hosts?.txt; fail "rank $r failed"; }
    done
    cmp one/last/model.safetensors hosts/last/model.safetensors || fail "hosts with shards of $shard have other parameters than one rank"
    echo "three hosts, links $how, shards of $shard: the bits of one ($(($(date +%s) - started)) s)"
done

# a sequence cut over the hosts, its states by maps: the losses of one within rounding
sequences="--set train.steps=3 --set train.context=48 --set train.log_every=1 --set train.eval_every=0 --set train.warmup=0"
losses() { sed -n 's/.*"loss":\([^,]*\),"lr".*/\1/p' "$1/metrics.jsonl"; }
# shellcheck disable=SC2086
env -u WORLD_SIZE "$mneme" train $config $sequences --set out=whole > whole.txt 2>&1
for states in maps pipeline; do
    rm -rf parts
    # shellcheck disable=SC2086
    start parts $sequences --set train.sequence_ranks=3 --set "train.sequence_states=$states"
    for r in 0 1 2; do
        eval "wait \$pid$r" || { cat parts?.txt; fail "rank $r failed"; }
    done
    losses whole > a
    losses parts > b
    [ "$(wc -l < a)" = 3 ] || fail "no losses of one rank"
    paste -d ' ' a b | awk '{ d = $1 - $2; if (d < 0) d = -d; if (!(d <= 1e-4 * $1)) bad = 1 } END { exit bad }' || fail "a sequence over hosts has other losses"
    echo "three hosts, one sequence by $states: the losses of one within rounding"
done

# a file of one rank that may not grow, as on a full disk; and a disk that is full for all of them
rm -rf full
started=$(date +%s)
for r in 0 1 2; do
    limit=unlimited
    [ $r != 1 ] || limit=40
    # shellcheck disable=SC2086
    RANK=$r LOCAL_RANK=0 timeout 600 ip netns exec "$tag$r" sh -c "ulimit -f $limit && exec \"\$@\"" sh "$mneme" train $config --set train.steps=6 \
        --set train.checkpoint_every=3 --set out=full > "full$r.txt" 2>&1 &
    eval "pid$r=$!"
done
for r in 0 1 2; do
    if eval "wait \$pid$r"; then cat full?.txt; fail "rank $r went on though rank 1 could not write"; fi
done
grep -q "rank 0 stops: .*rank 1: .*cannot write" full0.txt || { cat full?.txt; fail "rank 0 does not say that rank 1 could not write"; }
[ ! -e full/last ] || fail "a checkpoint without the part of rank 1"
echo "rank 1 cannot write: all stopped within $(($(date +%s) - started)) seconds"
mkdir disk
if mount -t tmpfs -o size=1500k tmpfs disk 2> /dev/null; then
    started=$(date +%s)
    start disk/run --set train.steps=40 --set train.checkpoint_every=1 --set train.keep_every=1 --set train.eval_every=0
    stopped=0
    for r in 0 1 2; do
        if eval "wait \$pid$r"; then cat run?.txt; umount disk; fail "rank $r went on though the disk is full"; fi
        stopped=$((stopped + 1))
    done
    env -u WORLD_SIZE "$mneme" eval --model "disk/run/last" --text book.txt > eval.txt 2>&1 || { cat eval.txt; umount disk; fail "the checkpoint before the full disk is broken"; }
    umount disk
    echo "a full disk: all $stopped stopped within $(($(date +%s) - started)) seconds, the checkpoint before it is whole"
fi

start parted --set train.steps=1000000 --set train.checkpoint_every=5 --set train.eval_every=0
tries=0
while [ ! -e parted/last ] && [ $tries -lt 3000 ]; do sleep 0.1; tries=$((tries + 1)); done
[ -e parted/last ] || fail "no checkpoint"
ip -n "${tag}b" link set v2 down    # with LINK as with a bridge: nothing comes or goes there any more
started=$(date +%s)
for r in 0 1 2; do
    if eval "wait \$pid$r"; then fail "rank $r went on in a network that is parted"; fi
    grep -q "stops: rank . of 3 is gone\|stops: rank . gave up" "parted$r.txt" || { cat "parted$r.txt"; fail "rank $r does not say why"; }
done
took=$(($(date +%s) - started))
[ $took -le 45 ] || fail "it took $took seconds to notice"
echo "a network that parts: all stopped within $took seconds"
