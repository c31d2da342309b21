#!/usr/bin/env bash
# Trains a model with PyTorch and Gloo on four servers in network namespaces: once as it is, and once by 'fared exec' while leaves fail and return. All ranks
# of both runs must end with equal weights, bit by bit. It needs root, Linux 6.6, python3-torch, iproute2, procps and util-linux.
#
#   sudo examples/pytorch/run.sh [FARED [STEPS]]     FARED: path of fared (bin/fared); STEPS: 4 or more (80)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
fared=$(realpath "${1:-$here/../../bin/fared}")
steps=${2:-80}
python=/usr/bin/python3 # Debian's, which has python3-torch
"$python" -c 'import torch' 2>/dev/null || { echo "run.sh: PyTorch is missing (Debian package python3-torch)" >&2; exit 1; }
[ "$steps" -ge 4 ] || { echo "run.sh: $steps steps: use 4 or more" >&2; exit 2; }

work=$(mktemp -d)
pids=()
down() {
  [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null || true
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
  for _ in {1..300}; do
    ! "$@" || return 0
    sleep 0.1
  done
  echo "run.sh: not within 30 s: $what" >&2
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
  for device in $(in_node "$1" ip -br link | awk '$1 != "lo" { sub("@.*", "", $1); print $1 }'); do
    in_node "$1" ip link set "$device" "$2"
  done
  echo "$1 is $2"
}

reached() { grep -q "^step $1 " "$log"; }

train() { # NAME: starts two ranks on each server, by fared exec if the name is not plain
  local i words
  log=$work/$1.out
  : >"$log"
  jobs=()
  for i in 1 2 3 4; do
    words=()
    [ "$1" = plain ] || words=("$fared" exec --report --file "/run/fared/pytorch/server$i/slots" --)
    nsenter --net="/run/netns/pytorch-server$i" -- "${words[@]}" env "SERVER=server$i" GLOO_SOCKET_IFNAME=gpu0 OMP_NUM_THREADS=1 \
      MASTER_ADDR=10.255.0.1 MASTER_PORT=40000 WORLD_SIZE=8 \
      sh -c 'RANK=$1 "$3" "$4" "$5" & other=$!; RANK=$2 "$3" "$4" "$5" && wait $other' sh $((2 * i - 2)) $((2 * i - 1)) "$python" "$here/train.py" "$steps" \
      >>"$log" 2>>"$work/$1.err" &
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

train slots
await 'the first quarter' reached $((steps / 4))
leaf leaf1 down
await 'weights without leaf1' weights 1:0:1:1
await 'the second quarter' reached $((steps / 2))
leaf leaf1 up
await 'weights of all planes' weights 1:1:1:1
leaf leaf2 down
await 'weights without leaf2' weights 1:1:0:1
reached "$steps" && { echo "run.sh: the training has ended before the failures: use more STEPS" >&2; exit 1; }
finish slots

different=$(cat "$work"/plain.out "$work"/slots.out | sed -n 's/^rank .*: weights //p' | sort | uniq -c)
[ "$(echo "$different" | awk '{ print $1 }')" = 16 ] || { echo "run.sh: weights differ: $different" >&2; exit 1; }
echo "8 ranks, 2 runs: equal weights $(echo "$different" | awk '{ print $2 }')"
