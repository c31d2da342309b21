#!/usr/bin/env bash
# Trains a model with PyTorch and Gloo on four servers in network namespaces: once as it is, and once by 'fared exec' while leaves fail and return. All ranks
# of both runs must end with equal weights, bit by bit, after equal gradients in all steps. It needs root, Linux 6.6, python3-torch, iproute2, procps and util-linux.
#
#   sudo examples/pytorch/run.sh [FARED [STEPS]]     FARED: path of fared (bin/fared); STEPS: 40 or more (300)
#
# DOWN and UP are the seconds for which a leaf is down, and up until the next one fails (1.5 and 2.5), OUTAGES the greatest number of failures (100). A leaf is
# down for three steps at least. SVG is the file that receives a drawing of the steps' times (steps.svg).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
fared=$(realpath "${1:-$here/../../bin/fared}")
steps=${2:-300}
svg=${SVG:-steps.svg}
python=/usr/bin/python3 # Debian's, which has python3-torch
"$python" -c 'import torch' 2>/dev/null || { echo "run.sh: PyTorch is missing (Debian package python3-torch)" >&2; exit 1; }
[ "$steps" -ge 40 ] || { echo "run.sh: $steps steps: use 40 or more" >&2; exit 2; }

work=$(mktemp -d)
pids=() jobs=()
down() {
  kill "${pids[@]}" "${jobs[@]}" 2>/dev/null || true
  wait
  sh "$work/fabric/netns.sh" down
  rm -rf "$work" /run/fared/pytorch
}

in_node() { # NODE COMMAND...: unlike 'ip netns exec' it leaves the cgroup file system visible
  local node=$1
  shift
  nsenter --net="/run/netns/pytorch-$node" -- "$@"
}

"$fared" topo generate "$here/fabric.yaml" --out "$work/fabric" --for netns >/dev/null
# The ports of the program's listeners are steered, and each pair has eight slots for each of its eight sub-ports.
sed -i -e 's/^weights: {/weights: {slots: 64, /' -e 's/^dataplane: {/dataplane: {tcp_port_range: 32768-49151, /' "$work"/fabric/nodes/server*/fared.yaml
trap down EXIT
sh "$work/fabric/netns.sh" up
for config in "$work"/fabric/nodes/*/fared.yaml; do
  node=$(basename "$(dirname "$config")")
  mkdir -p "/run/fared/pytorch/$node"
  driver=linux
  case $node in
  server*)
    driver=bpf
    # The kernel gives listeners the steered ports. The bridge has no ports: Gloo uses its name to find the server's loopback.
    in_node "$node" sysctl -qw net.ipv4.ip_local_port_range='32768 49151'
    in_node "$node" ip link add gpu0 type bridge
    in_node "$node" ip addr add "10.255.0.${node#server}/32" dev gpu0
    in_node "$node" ip link set gpu0 up
    ;;
  esac
  nsenter --net="/run/netns/pytorch-$node" -- "$fared" dataplane --driver $driver --socket "/run/fared/pytorch/$node/dataplane.sock" --journal "$work/$node.journal" &>"$work/$node-agent.log" &
  pids+=($!)
  role=run
  [ $driver = bpf ] || role=leaf
  nsenter --net="/run/netns/pytorch-$node" -- "$fared" $role --config "$config" &>"$work/$node.log" &
  pids+=($!)
done

await() { # WHAT COMMAND...: until the command succeeds
  local what=$1
  shift
  for _ in {1..600}; do
    ! "$@" || return 0
    sleep 0.2 # the commands compete with the training
  done
  echo "run.sh: not within two minutes: $what" >&2
  tail -n 3 "$work"/*.log >&2
  exit 1
}

weights() { # WEIGHTS: does every server forward by them to the three others?
  local i n
  for i in 1 2 3 4; do
    n=$("$fared" --socket "/run/fared/pytorch/server$i/fared.sock" weights 2>/dev/null | grep -c " $1 .*in effect") || return 1
    [ "$n" = 3 ] || return 1
  done
}

leaf() { # LEAF up|down
  local device
  echo "$(date +%s.%N) $1 $2" >>"$work/events"
  for device in $(in_node "$1" ip -br link | awk '$1 != "lo" { sub("@.*", "", $1); print $1 }'); do
    in_node "$1" ip link set "$device" "$2"
  done
}

# The bytes that have arrived at each leaf.
carried() {
  local i
  for i in 0 1 2 3; do
    # shellcheck disable=SC2016 # awk expands it
    echo "$(in_node "leaf$i" awk 'NR > 2 && $1 != "lo:" { sub(".*:", ""); n += $1 } END { printf "%.0f", n }' /proc/net/dev) leaf$i"
  done
}

step() { grep -c '^step ' "$log"; }
reached() { [ "$(step)" -ge "$1" ]; }

train() { # NAME: starts a rank on each server, by fared exec if the name is not plain
  local i words
  log=$work/$1.out
  : >"$log"
  jobs=()
  for i in 1 2 3 4; do
    words=()
    [ "$1" = plain ] || words=("$fared" exec --report --file "/run/fared/pytorch/server$i/slots" --)
    nsenter --net="/run/netns/pytorch-server$i" -- "${words[@]}" env "SERVER=server$i" HOLD="$work/hold" GLOO_SOCKET_IFNAME=gpu0 OMP_NUM_THREADS=1 \
      MASTER_ADDR=10.255.0.1 MASTER_PORT=40000 WORLD_SIZE=4 RANK=$((i - 1)) "$python" "$here/train.py" "$steps" >>"$log" 2>>"$work/$1.err" &
    jobs+=($!)
  done
}

finish() { # NAME: waits for the program on all servers, and shows its last lines
  local job
  for job in "${jobs[@]}"; do
    wait "$job" || { echo "run.sh: the training has failed" >&2; tail -n 40 "$work/$1.err" >&2; exit 1; }
  done
  echo "$1: $(grep "^step $steps " "$log")"
  grep '^fared exec' "$work/$1.err" || true
}

await 'weights of all planes' weights 1:1:1:1
train plain
finish plain

before=$(carried)
# The training waits for the first failure, and for the last return before its end, however busy the machine is.
mkdir "$work/hold"
touch "$work/hold/first" "$work/hold/last"
train slots
await 'the first steps' reached 5
# Leaves fail in turn, those that carry the training's packets.
carried | sort -k 2 | join -1 2 -2 2 <(echo "$before" | sort -k 2) - | awk '$3 - $2 > 1000000 { printf "%.0f %s\n", $3 - $2, $1 }' | sort -rn >"$work/order"
sed 's/\(.*\) \(.*\)/\2 has carried \1 bytes in the first steps/' "$work/order"
mapfile -t leaves < <(awk '{ print $2 }' "$work/order")
outages=0
while [ "$outages" -lt "${OUTAGES:-100}" ] && ! reached $((steps - 5)); do
  name=${leaves[outages % ${#leaves[@]}]}
  planes=(1 1 1 1)
  planes[${name#leaf}]=0
  begun=$(step)
  leaf "$name" down
  rm -f "$work/hold/first"
  sleep "${DOWN:-1.5}"
  await "weights without $name" weights "$(IFS=:; echo "${planes[*]}")"
  await "steps without $name" reached $((begun + 3 < steps - 3 ? begun + 3 : steps - 3))
  went=$(($(step) - begun))
  leaf "$name" up
  await 'weights of all planes' weights 1:1:1:1
  outages=$((outages + 1))
  echo "$name was down for $went steps"
  sleep "${UP:-2.5}"
done
rm "$work/hold/last"
finish slots

different=$(cat "$work"/plain.out "$work"/slots.out | sed -n 's/^rank .*: //p' | sort | uniq -c)
[ "$(echo "$different" | awk '{ print $1 }')" = 8 ] || { echo "run.sh: ranks differ: $different" >&2; exit 1; }
"$python" "$here/steps.py" "$work/plain.out" "$work/slots.out" "$work/events" "$svg"
echo "4 ranks, 2 runs, $outages failures: equal $(echo "$different" | awk '{ print $2, $3, $4, $5 }')"
