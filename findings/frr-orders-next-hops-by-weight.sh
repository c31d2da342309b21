#!/usr/bin/env bash
# FRR 8.4.4 (Debian 12, frr 8.4.4-1.1~deb12u2), multipath over four neighbors with a Link Bandwidth of 8 Gbit/s, the last of which then advertises 4, as when half of
# its cable is cut.
# Expected: 21 % of the flows change their next hop, because the kernel moves the borders between its shares (25 - 100/7 = 11 % must).
# Seen: 79 %. zebra writes next hops in ascending order of their weights, so the one that changed is now the first, and each of the others has moved by a place.
# FRR 10.3 keeps the order of the addresses. BIRD's order is descending (bird-orders-next-hops-by-weight.sh).
set -euo pipefail
. "$(dirname "$0")/lib/frr.sh"
unpack bookworm frr=8.4.4-1.1~deb12u2
start "router bgp 65010
 bgp router-id 10.1.0.1
 no bgp ebgp-requires-policy
 timers bgp 8 24
 neighbor 10.6.0.2 remote-as 65101
 neighbor 10.6.0.3 remote-as 65101
 neighbor 10.6.0.4 remote-as 65101
 neighbor 10.6.0.5 remote-as 65101
 address-family ipv4 unicast
  maximum-paths 4"
ip netns exec "$router" sysctl -qw net.ipv4.fib_multipath_hash_policy=1
full=c010080004fe4d4e6e6b28 half=c010080004fe4d4dee6b28
exchange 45 "10.6.0.2:65101:$full" "10.6.0.3:65101:$full" "10.6.0.4:65101:$full" "10.6.0.5:65101:$full,$half" &
pids+=($!)
routed '10\.6\.0\.2 .* weight 25 .*10\.6\.0\.3 .* weight 25 .*10\.6\.0\.4 .* weight 25 .*10\.6\.0\.5 .* weight 25'
flows >"$work/before"
routed '10\.6\.0\.5 .* weight 14 .*10\.6\.0\.2 .* weight 28 .*10\.6\.0\.3 .* weight 28 .*10\.6\.0\.4 .* weight 28'
flows >"$work/after"
ip -n "$router" route replace 10.255.0.2 nexthop via 10.6.0.2 weight 28 nexthop via 10.6.0.3 weight 28 nexthop via 10.6.0.4 weight 28 nexthop via 10.6.0.5 weight 14
flows >"$work/kept"
frr=$(moved "$work/before" "$work/after") kept=$(moved "$work/before" "$work/kept")
if [ "$frr" -lt 70 ] || [ "$kept" -gt 30 ]; then echo "changed: $frr % of the flows move, $kept % in the previous order"; exit 1; fi
echo "as found: $frr % of the flows move; in the previous order of next hops $kept %"
