#!/usr/bin/env bash
# BIRD 2.17.6 (Debian 13, bird2 2.17.6-0+deb13u1): a route over four next hops of weight 2, the first of which then gets weight 1, as when half of its cable is cut.
# Expected: 21 % of the flows change their next hop, because the kernel moves the borders between its shares (25 - 100/7 = 11 % must).
# Seen: 79 %. BIRD writes next hops in descending order of their weights, so the one that changed is now the last, and each of the others has moved by a place.
set -euo pipefail
. "$(dirname "$0")/lib/bird.sh"
unpack trixie bird2=2.17.6-0+deb13u1
hops() { echo "protocol static { ipv4; route 10.255.0.2/32 via 10.6.0.2 weight $1 via 10.6.0.3 weight 2 via 10.6.0.4 weight 2 via 10.6.0.5 weight 2; }"; }
start "$(hops 2)"
routed '10\.6\.0\.2 .*10\.6\.0\.3 .*10\.6\.0\.4 .*10\.6\.0\.5 '
flows >"$work/before"
configuration "$(hops 1)"
birdc configure >/dev/null
routed '10\.6\.0\.3 .*10\.6\.0\.4 .*10\.6\.0\.5 .*10\.6\.0\.2 .* weight 1'
flows >"$work/after"
ip -n "$router" route replace 10.255.0.2 nexthop via 10.6.0.2 weight 1 nexthop via 10.6.0.3 weight 2 nexthop via 10.6.0.4 weight 2 nexthop via 10.6.0.5 weight 2
flows >"$work/kept"
bird=$(moved "$work/before" "$work/after") kept=$(moved "$work/before" "$work/kept")
if [ "$bird" -lt 70 ] || [ "$kept" -gt 30 ]; then echo "changed: $bird % of the flows move, $kept % in the previous order"; exit 1; fi
echo "as found: $bird % of the flows move; in the previous order of next hops $kept %"
