#!/bin/sh
# Ranks as hosts of their own: network namespaces on a bridge, with delay and loss between them. The bits of one rank; a
# network that parts while they train stops all of them with a sentence.
#   namespaces.sh MNEME SOURCE_DIR
set -eu
mneme=$1
[ "$(id -u)" = 0 ] || { echo "skipped: network namespaces need root"; exit 77; }
command -v ip > /dev/null && command -v tc > /dev/null || { echo "skipped: ip and tc (iproute2) are not installed"; exit 77; }
tag=mn$$
how="with 2 ms of delay and 1 % of loss"
ip netns add "$tag"0 2> /dev/null || { echo "skipped: this machine makes no network namespaces"; exit 77; }
folder=$(mktemp -d)
clean() {
    for r in 0 1 2; do ip netns del "$tag$r" 2> /dev/null || true; done
    ip netns del "${tag}b" 2> /dev/null || true
    rm -rf "$folder"
}
trap clean EXIT INT TERM
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
ip -n "${tag}b" link add br0 type bridge 2> /dev/null || skip "no bridges here"
ip -n "${tag}b" link set br0 up
for r in 0 1 2; do
    ip -n "${tag}b" link add "v$r" type veth peer name eth0 netns "$tag$r" 2> /dev/null || skip "no veth here"
    ip -n "${tag}b" link set "v$r" master br0 up
    ip -n "$tag$r" addr add "10.77.0.$((r + 1))/24" dev eth0
    ip -n "$tag$r" link set eth0 up
    ip -n "$tag$r" link set lo up
    ip netns exec "$tag$r" tc qdisc add dev eth0 root netem delay 2ms loss 1% 2> /dev/null || how="as they are: no netem here"
done
awk 'BEGIN { srand(3); for (i = 0; i < 3000; i++) printf "%s ", substr("thecatsatonamatandabirdsang", 1 + int(24 * rand()), 3) }' > book.txt
config="--threads 1 --quiet --set data.train=book.txt --set model.layers=gdn --set model.hidden_size=64 --set train.batch=2
    --set train.accumulate=6 --set train.context=32 --set train.tensorboard=false"
export WORLD_SIZE=3 MASTER_ADDR=10.77.0.1 MASTER_PORT=29400 MNEME_TOKEN=between-hosts
# shellcheck disable=SC2086
start() {
    out=$1
    shift
    for r in 0 1 2; do
        RANK=$r LOCAL_RANK=0 timeout 600 ip netns exec "$tag$r" "$mneme" train $config --set "out=$out" "$@" > "$out$r.txt" 2>&1 &
        eval "pid$r=$!"
    done
}
# shellcheck disable=SC2086
env -u WORLD_SIZE "$mneme" train $config --set train.steps=4 --set out=one > one.txt 2>&1
start hosts --set train.steps=4
for r in 0 1 2; do
    eval "wait \$pid$r" || { cat hosts?.txt; fail "rank $r failed"; }
done
cmp one/last/model.safetensors hosts/last/model.safetensors || fail "hosts have other parameters than one rank"
echo "three hosts, links $how: the bits of one"

start parted --set train.steps=1000000 --set train.checkpoint_every=5 --set train.eval_every=0
tries=0
while [ ! -e parted/last ] && [ $tries -lt 3000 ]; do sleep 0.1; tries=$((tries + 1)); done
[ -e parted/last ] || fail "no checkpoint"
ip -n "${tag}b" link set v2 down
started=$(date +%s)
for r in 0 1 2; do
    if eval "wait \$pid$r"; then fail "rank $r went on in a network that is parted"; fi
    grep -q "stops: rank . of 3 is gone\|stops: rank . gave up" "parted$r.txt" || { cat "parted$r.txt"; fail "rank $r does not say why"; }
done
took=$(($(date +%s) - started))
[ $took -le 45 ] || fail "it took $took seconds to notice"
echo "a network that parts: all stopped within $took seconds"
