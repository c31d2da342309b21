# Sourced by findings: BIRD of a Debian suite, as lib/frr.sh. The next hops 10.6.0.2 to 10.6.0.5 are neighbors over one device.
# shellcheck shell=bash
. "$(dirname "${BASH_SOURCE[0]}")/frr.sh"

# start CONFIGURATION: BIRD, which writes IPv4 routes into the kernel.
start() {
  ip netns add "$router"
  ip netns add "$peers"
  ip link add r0 netns "$router" type veth peer name p0 netns "$peers"
  ip -n "$router" link set lo up
  ip -n "$peers" link set p0 up
  ip -n "$router" addr add 10.6.0.1/24 dev r0
  ip -n "$router" link set r0 up
  ip netns exec "$router" sysctl -qw net.ipv4.fib_multipath_hash_policy=1
  configuration "$1"
  program usr/sbin/bird -f -c "$work/bird.conf" -s "$work/bird.ctl" -P "$work/bird.pid" >"$work/bird.log" 2>&1 &
  pids+=($!)
  for _ in {1..100}; do [ ! -S "$work/bird.ctl" ] || return 0; sleep 0.1; done
  tail -5 "$work/bird.log" >&2
  return 1
}

# configuration TEXT: the file.
configuration() {
  echo "log stderr all; router id 10.1.0.1; protocol device {} protocol kernel { ipv4 { import none; export all; }; } $1" >"$work/bird.conf"
}

# birdc WORD...
birdc() { (program usr/sbin/birdc -s "$work/bird.ctl" "$@"); }
