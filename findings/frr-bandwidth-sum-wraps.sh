#!/usr/bin/env bash
# FRR 10.3 (Debian 13, frr 10.3-3+deb13u1), `set extcommunity bandwidth cumulative`, two routes with a Link Bandwidth of 400 Gbit/s (5e10 octets a second, float
# 513a43b7).
# Expected: the float of 1e11 octets a second, 51ba43b7.
# Seen: the sum modulo 2^32 octets a second, float 4e90edc0 (1,215,750,144: 9.7 Gbit/s), with the AS of the router. FRR 8.4.4 does the same.
#   16 0004fdf24e90edc0
set -euo pipefail
. "$(dirname "$0")/lib/frr.sh"
unpack trixie frr=10.3-3+deb13u1
start "router bgp 65010
 bgp router-id 10.1.0.1
 no bgp ebgp-requires-policy
 bgp bestpath as-path multipath-relax
 neighbor 10.6.0.2 remote-as 65102
 neighbor 10.6.0.3 remote-as 65101
 neighbor 10.6.0.4 remote-as 65101
 address-family ipv4 unicast
  neighbor 10.6.0.2 route-map OUT out
  neighbor 10.6.0.2 advertisement-interval 0
route-map OUT permit 10
 set extcommunity bandwidth cumulative"
exchange 10 10.6.0.2:65102: 10.6.0.3:65101:c010080004fe4d513a43b7 10.6.0.4:65101:c010080004fe4d513a43b7
expect '^16 0004fdf24e90edc0$' "the sum has lost its upper bits"
