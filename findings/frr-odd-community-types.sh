#!/usr/bin/env bash
# FRR 10.3 (Debian 13, frr 10.3-3+deb13u1): a route with two extended communities of experimental, transitive types (bit 0x40 clear, RFC 4360, Section 2),
# 8e04... and 8f04..., from one neighbor of another AS to a second one.
# Expected: both pass.
# Seen: the odd type, 8f, is taken for non-transitive and removed; the even one, 8e, passes. FRR 8.4.4 passes both.
#   16 8e040a0000010190
set -euo pipefail
. "$(dirname "$0")/lib/frr.sh"
unpack trixie frr=10.3-3+deb13u1
start "router bgp 65010
 bgp router-id 10.1.0.1
 no bgp ebgp-requires-policy
 neighbor 10.6.0.2 remote-as 65102
 neighbor 10.6.0.3 remote-as 65101
 address-family ipv4 unicast
  neighbor 10.6.0.2 advertisement-interval 0"
exchange 10 10.6.0.2:65102: 10.6.0.3:65101:c010108e040a00000101908f040a0000010190
expect '^16 8e040a0000010190$' "the even type alone passes"
