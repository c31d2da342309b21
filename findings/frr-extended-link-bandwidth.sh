#!/usr/bin/env bash
# FRR 10.3 (Debian 13, frr 10.3-3+deb13u1), neighbor X extended-link-bandwidth with `set extcommunity bandwidth cumulative`, two routes with
# a Link Bandwidth of 8 Gbit/s (1e9 octets a second, float 4e6e6b28).
# Expected: the sum of 16 Gbit/s in both attributes, or in the new one alone.
# Seen: the sum in attribute 25 (IPv6 Address Specific Extended Communities), as a 64-bit integer of octets a second, 2e9 = 77359400 hexadecimal, next to
# the Link Bandwidth of one route, unchanged, in attribute 16. A receiver that ignores attribute 25 has half of the bandwidth.
#   16 0004fe4d4e6e6b28
#   25 020600000000000077359400 0000fdf2 00000000   (blanks added)
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
 neighbor 10.6.0.2 extended-link-bandwidth
 address-family ipv4 unicast
  neighbor 10.6.0.2 route-map OUT out
  neighbor 10.6.0.2 advertisement-interval 0
route-map OUT permit 10
 set extcommunity bandwidth cumulative"
exchange 10 10.6.0.2:65102: 10.6.0.3:65101:c010080004fe4d4e6e6b28 10.6.0.4:65101:c010080004fe4d4e6e6b28
expect '^16 0004fe4d4e6e6b28$' "Link Bandwidth has the value of one route"
expect '^25 020600000000000077359400' "attribute 25 has the sum"
