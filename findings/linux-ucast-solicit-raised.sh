#!/usr/bin/env bash
# Linux 6.18 (net/ipv4/arp.c, arp_solicit), a veth: `ucast_solicit` of the device is raised while a neighbor is being resolved.
# Expected: the entry, in state INCOMPLETE, keeps its broadcast requests; the setting is about entries that are confirmed again.
# Seen: all further requests are unicasts to 00:00:00:00:00:00, which no host answers, until the entry has had as many probes as the new value: it began with the former
# value, and less than `ucast_solicit` probes means unicast. With 300 and one request each 10 ms, a neighbor that is there is not found for five seconds. An entry that is
# made after the change is resolved by broadcasts. `mcast_resolicit` gives as much patience with known neighbors without this.
set -euo pipefail
work=$(mktemp -d)
a=find-$$-a
b=find-$$-b
trap 'ip netns del $a; ip netns del $b; rm -rf "$work"' EXIT
ip netns add $a
ip netns add $b
ip link add e0 netns $a type veth peer name e1 netns $b
ip -n $a address add 192.0.2.0/31 dev e0
ip -n $a link set e0 up
ip -n $b link set e1 up # without an address: no answer yet

listen() { # the link-layer destinations of ARP requests for a neighbor in two seconds
  timeout 2 ip netns exec $b tcpdump -lnei e1 "arp[6:2] = 1 and arp[24:4] = 0xc0000201" 2>"$work/log" | awk '/ARP/ {print $4}' | tr -d , | sort -u || true
}
sysctl() { ip netns exec $a sysctl -qw "$@"; }

sysctl net.ipv4.neigh.e0.mcast_solicit=300
before=$({ sleep 0.5; ip netns exec $a ping -c1 -W1 192.0.2.1 >/dev/null || true; } & listen)
sysctl net.ipv4.neigh.e0.ucast_solicit=300 # the entry is INCOMPLETE
after=$(listen)
ip -n $a neigh flush dev e0
fresh=$({ sleep 0.5; ip netns exec $a ping -c1 -W1 192.0.2.1 >/dev/null || true; } & listen)

echo "$(uname -r): requests go to $before, after the sysctl was raised to $after, of a new entry to $fresh"
[ "$before" = ff:ff:ff:ff:ff:ff ] && [ "$after" = 00:00:00:00:00:00 ] && [ "$fresh" = ff:ff:ff:ff:ff:ff ]
