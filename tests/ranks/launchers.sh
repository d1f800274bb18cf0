#!/bin/sh
# Launchers: Open MPI and MPICH (those that are installed), variables of torchrun and people, a token for other
# machines. All give the bits of one rank.
#   launchers.sh MNEME SOURCE_DIR
set -eu
mneme=$1
. "$2/tests/support/temporary.sh"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
cd "$folder"
fail() {
    echo "launchers: $*" >&2
    exit 1
}
awk 'BEGIN { srand(3); for (i = 0; i < 3000; i++) printf "%s ", substr("thecatsatonamatandabirdsang", 1 + int(24 * rand()), 3) }' > book.txt
config="--threads 1 --quiet --set data.train=book.txt --set model.layers=gdn --set model.hidden_size=64 --set train.steps=3
    --set train.batch=2 --set train.accumulate=4 --set train.context=32 --set train.tensorboard=false"
same() {
    cmp one/last/model.safetensors "$1/last/model.safetensors" || fail "$1 has other parameters"
}
# shellcheck disable=SC2086
{
    "$mneme" train $config --set out=one > one.txt 2>&1 || { cat one.txt; fail "one rank failed"; }
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    if command -v mpirun.openmpi > /dev/null; then
        for transport in auto mpi tcp; do
            rm -rf mpi
            timeout 600 mpirun.openmpi --oversubscribe -n 4 "$mneme" train $config --transport $transport --set out=mpi > mpi.txt 2>&1 ||
                { cat mpi.txt; fail "Open MPI with --transport $transport failed"; }
            same mpi
        done
        echo "Open MPI: in order"
    else
        echo "Open MPI: skipped, mpirun.openmpi is not installed"
    fi
    if command -v mpirun.mpich > /dev/null; then
        for transport in auto mpi tcp; do
            rm -rf mpi
            timeout 600 mpirun.mpich -n 4 "$mneme" train $config --transport $transport --set out=mpi > mpi.txt 2>&1 ||
                { cat mpi.txt; fail "MPICH with --transport $transport failed"; }
            same mpi
        done
        echo "MPICH: in order"
    else
        echo "MPICH: skipped, mpirun.mpich is not installed"
    fi

    # variables, in the order in which ranks happen to start: rank 0 last
    rm -rf env
    export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 12000))
    RANK=1 LOCAL_RANK=1 timeout 600 "$mneme" train $config --set out=env > env1.txt 2>&1 &
    other=$!
    sleep 1
    RANK=0 LOCAL_RANK=0 timeout 600 "$mneme" train $config --set out=env > env0.txt 2>&1 || { cat env0.txt; fail "rank 0 failed"; }
    wait $other || { cat env1.txt; fail "rank 1 failed"; }
    same env

    # a token that is wrong, and a stranger, are refused and logged
    rm -rf env
    export MNEME_MEET_SECONDS=5
    RANK=0 MNEME_TOKEN=right timeout 600 "$mneme" train $config --set out=env > env0.txt 2>&1 &
    first=$!
    sleep 0.5
    if RANK=1 MNEME_TOKEN=wrong timeout 600 "$mneme" train $config --set out=env > env1.txt 2>&1; then fail "a wrong token was taken"; fi
    if wait $first; then fail "rank 0 went on without rank 1"; fi
    grep -q "its token is wrong" env1.txt || { cat env1.txt; fail "rank 1 does not say why"; }
    grep -q "refused a connection from 127.0.0.1: its token is wrong" env0.txt || { cat env0.txt; fail "rank 0 did not log it"; }
    grep -q "1 of 2 ranks did not come within 5 seconds: 1" env0.txt || { cat env0.txt; fail "rank 0 does not say who is missing"; }

    # other machines need a token
    if RANK=1 MASTER_ADDR=192.0.2.1 timeout 600 "$mneme" train $config --set out=env > env1.txt 2>&1; then fail "no token was needed"; fi
    grep -q "need MNEME_TOKEN" env1.txt || { cat env1.txt; fail "no word on MNEME_TOKEN"; }

    # other settings on one rank
    rm -rf env
    RANK=1 timeout 600 "$mneme" train $config --set train.lr=0.5 --set out=env > env1.txt 2>&1 &
    other=$!
    if RANK=0 timeout 600 "$mneme" train $config --set out=env > env0.txt 2>&1; then fail "ranks with other settings trained"; fi
    if wait $other; then fail "ranks with other settings trained"; fi
    grep -q "configuration or the version of mneme differs" env0.txt || { cat env0.txt; fail "no word on the settings"; }
}
echo "launchers: in order"
