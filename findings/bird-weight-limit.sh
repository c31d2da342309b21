#!/usr/bin/env bash
# BIRD 2.17.6 (Debian 13, bird2 2.17.6-0+deb13u1): a filter that sets the attribute weight of a route to 300.
# Expected: `birdc configure` refuses the filter, or the weight is 256, the largest one of a next hop in Linux.
# Seen: `birdc configure` succeeds, the filter ends with an error for each route, and the kernel has none.
#   bird: filters, line 1: Setting weight value out of bounds
set -euo pipefail
. "$(dirname "$0")/lib/bird.sh"
unpack trixie bird2=2.17.6-0+deb13u1
hop() { echo "protocol static { ipv4 { import filter { weight = $1; accept; }; }; route 10.255.0.2/32 via 10.6.0.2; }"; }
start "$(hop 256)"
routed '10\.6\.0\.2'
configuration "$(hop 300)"
birdc configure | grep -q Reconfigured
routed '^$'
grep -q 'Setting weight value out of bounds' "$work/bird.log"
echo "as found: weight 300 refuses the route"
