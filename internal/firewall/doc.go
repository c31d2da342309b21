// Package firewall reads the nftables rules of a network namespace and determines whether they drop a packet.
//
// It evaluates the rules as the kernel does, for a packet of which some properties are known (devices, protocol,
// destination port, the conntrack state of a first packet) and others are not (addresses, source port, marks, limits).
// A condition on an unknown property may hold or not, so the result of [Ruleset.Judge] is certain, or it is not given:
// a rule that this package cannot read never makes a packet count as dropped. Nothing is certain behind a rule that may
// change the packet, such as a translation of its destination.
//
// Rules of iptables-nft are nftables rules and are evaluated too. Those of the older iptables-legacy are not visible
// here.
//
// Sources: the kernel's include/uapi/linux/netfilter/nf_tables.h and net/netfilter/nf_tables_core.c; nft(8).
package firewall
