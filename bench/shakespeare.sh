#!/bin/sh
# Every layer on tinyshakespeare by the recipe of nanoGPT for CPUs: characters, 90/10 split, 4
# layers of width 128, context 64, batch 12, 2,000 steps of AdamW, learning rate 1e-3 to 1e-4.
#
#   sh bench/shakespeare.sh MNEME TEXT OUT [ROW...]
#
# No row has more parameters than attention: its MLP is narrowed until it has not. A row that is
# done is not run again; the table of all that are is printed at the end. THREADS (1) and SEED
# (1337) may be set.
set -eu
mneme=$1 text=$2 out=$3
shift 3
rows=${*:-"attention relu_attention linear retnet mamba2 gla mamba1 mlstm longhorn longhorn_column
    delta gdn kda gdn2 mesa palimpsa_paper palimpsa kla bayes bayes_rotation hypermlp hyperglu
    gla+ccq gdn+ccq bayes+ccq"}
threads=${THREADS:-1} seed=${SEED:-1337}
mkdir -p "$out"

# Sizes that differ from the defaults: rows whose defaults are wider than attention.
sizes() {
    case $1 in
    kla) echo "--set model.expand=1" ;;
    mamba1 | longhorn | longhorn_column) echo "--set model.mlp=none --set model.num_hidden_layers=6" ;;
    esac
}

train() {    # ROW INTERMEDIATE arguments
    row=$1 wide=$2
    shift 2
    # shellcheck disable=SC2046
    "$mneme" train --json --quiet --threads "$threads" --set data.train="$text" \
        --set model.layers="$row" --set model.hidden_size=128 --set model.num_hidden_layers=4 \
        --set model.intermediate_size="$wide" --set train.seed="$seed" \
        --set train.eval_every=250 --set train.checkpoint_every=0 $(sizes "$row") "$@"
}

count() {
    train "$1" "$2" --set out="$out/none" --dry-run 2>/dev/null |
        sed -n 's/.*"parameters": \([0-9]*\).*/\1/p'
}

most=$(count attention 344)
for row in $rows; do
    [ -s "$out/$row.json" ] && continue
    wide=344
    have=$(count "$row" $wide)
    fewer=$(count "$row" $((wide - 1)))
    if [ "$have" -gt "$most" ] && [ "$have" -gt "$fewer" ]; then
        step=$((have - fewer))
        wide=$((wide - (have - most + step - 1) / step))
    fi
    [ "$wide" -ge 1 ] || { echo "$row: too wide to fit" >&2; continue; }
    train "$row" "$wide" --set out="$out/runs/$row" --overwrite >"$out/$row.json.new"
    mv "$out/$row.json.new" "$out/$row.json"
done

value() { sed -n "s/.*\"$1\": *\([-0-9.e+]*\).*/\1/p" "$out/$2.json" | head -n 1; }
printf '| layer | parameters | held-out loss | best | seconds | tokens/s |\n|---|---|---|---|---|---|\n'
for file in "$out"/*.json; do
    row=$(basename "$file" .json)
    printf '| %s | %s | %.4f | %.4f | %.0f | %.0f |\n' "$row" "$(value parameters "$row")" \
        "$(value valid_loss "$row")" "$(value best_valid_loss "$row")" "$(value seconds "$row")" \
        "$(value tokens_per_second "$row")"
done
