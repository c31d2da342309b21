#!/usr/bin/env bash
# FRR 10.3 (Debian 13, frr 10.3-3+deb13u1), `neighbor X bfd`, a neighbor without BFD.
# Expected: the BGP session comes up, and BFD protects it once the neighbor starts BFD (RFC 5882, Section 4.4, and as FRR 8.4.4 does).
# Seen: bgpd closes every TCP connection of the neighbor as long as BFD is not up, so a neighbor that starts BFD when BGP is established never has a session. Another
# neighbor, without `bfd`, has its session and its routes.
set -euo pipefail
. "$(dirname "$0")/lib/frr.sh"
unpack trixie frr=10.3-3+deb13u1
start "router bgp 65010
 bgp router-id 10.1.0.1
 no bgp ebgp-requires-policy
 neighbor 10.6.0.2 remote-as 65102
 neighbor 10.6.0.3 remote-as 65101
 neighbor 10.6.0.3 bfd
 neighbor 10.6.0.4 remote-as 65103
 address-family ipv4 unicast
  neighbor 10.6.0.2 advertisement-interval 0" bfdd
exchange 10 10.6.0.2:65102: 10.6.0.4:65103:c0080400010002
expect '^8 00010002$' "the neighbor without bfd has its session"
exchange 15 10.6.0.2:65102: 10.6.0.3:65101:c0080400010001
! grep -q '^8 ' <<<"$received" || { echo "changed: the neighbor with bfd has one too"; exit 1; }
echo "as found: the neighbor with bfd has none"
