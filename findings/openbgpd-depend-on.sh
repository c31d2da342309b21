#!/usr/bin/env bash
# OpenBGPD 8.8 (Debian 13, openbgpd 8.8-1), `depend on r0` at a neighbor, where r0 is the device of the neighbor's cable and has a carrier.
# Expected: the session comes up, and ends when the cable fails (bgpd.conf(5): "kept in state IDLE as long as interface reports no link").
# Seen: the neighbor stays Idle and all of its connections are refused, while another one on the same device is Established. OpenBGPD 7.7 (Debian 12) does the same.
set -euo pipefail
. "$(dirname "$0")/lib/frr.sh"
unpack trixie openbgpd=8.8-1
ip netns add "$router"
ip netns add "$peers"
ip link add r0 netns "$router" type veth peer name p0 netns "$peers"
ip -n "$router" addr add 10.6.0.1/24 dev r0
for i in 2 3; do ip -n "$peers" addr add "10.6.0.$i/24" dev p0; done
for n in "$router" "$peers"; do ip -n "$n" link set lo up; done
ip -n "$router" link set r0 up
ip -n "$peers" link set p0 up
# bgpd executes itself, by the name that it was started by, and requires its user.
libraries=$work/root/usr/lib/x86_64-linux-gnu
loader="$libraries/ld-linux-x86-64.so.2 --library-path $libraries"
# shellcheck disable=SC2016 # expanded by the script
printf '#!/bin/sh\nexec %s --argv0 "$0" %s "$@"\n' "$loader" "$work/root/usr/sbin/bgpd" >"$work/bgpd"
chmod 755 "$work/bgpd"
echo "_openbgpd:x:65534:65534::$work:/bin/false" >"$work/passwd"
echo "AS 65010
router-id 10.1.0.1
socket \"$work/sock\"
neighbor 10.6.0.2 {
 remote-as 65102
}
neighbor 10.6.0.3 {
 remote-as 65101
 depend on \"r0\"
}
allow from any
allow to any" >"$work/bgpd.conf"
chmod 600 "$work/bgpd.conf"
# shellcheck disable=SC2016 # expanded by the inner shell
ip netns exec "$router" sh -c 'mount --bind "$0" /etc/passwd && exec "$@"' "$work/passwd" "$work/bgpd" -d -f "$work/bgpd.conf" >"$work/bgpd.log" 2>&1 &
pids+=($!)
for _ in {1..100}; do [ ! -S "$work/sock" ] || break; sleep 0.1; done
exchange 10 10.6.0.2:65102: 10.6.0.3:65101:
grep -q 'neighbor 10.6.0.2: state change OpenConfirm -> Established' "$work/bgpd.log" || { echo "changed: the neighbor without depend on"; cat "$work/bgpd.log"; exit 1; }
grep -q 'attempt from neighbor 10.6.0.3 while session is in state Idle' "$work/bgpd.log"
! grep -q 'neighbor 10.6.0.3: state change .* -> Established' "$work/bgpd.log" || { echo "changed: the neighbor with depend on has a session too"; exit 1; }
echo "as found: the neighbor with depend on has no session"
