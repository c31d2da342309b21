#!/usr/bin/env bash
# ifupdown2 3.0.0-1.1 and ifupdown 0.8.41 (Debian 12), an interfaces(5) file with `accept_ra 0` in a stanza inet6 static, as ifupdown documents it.
# Expected: both set net.ipv6.conf.e0.accept_ra to 0, or ifupdown2 names an option that it does not know.
# Seen: ifupdown sets it. ifup of ifupdown2 sets the address, exits with 0, prints nothing, and leaves 1: the server takes addresses and routes from router advertisements.
set -euo pipefail
. "$(dirname "$0")/lib/frr.sh"
unpack bookworm ifupdown=0.8.41
mkdir -p "$work/etc/network" "$work/run/network"
cat >"$work/etc/network/interfaces" <<'FILE'
auto e0
iface e0 inet6 static
    address 2001:db8::1/64
    accept_ra 0
    dad-attempts 0
FILE
# up PROGRAM WORD...: e0 as it is made, and a program of the packages that brings it up with the file. Prints accept_ra.
up() {
  ip netns add "$router"
  ip -n "$router" link add e0 type veth peer name p0
  # shellcheck disable=SC2016 # expanded by the inner shell
  ip netns exec "$router" sh -ec 'work=$0
    mount -t overlay -o "lowerdir=$work/etc:$work/root/etc:/etc" o /etc
    mount -t overlay -o "lowerdir=$work/root/usr/share:/usr/share" o /usr/share
    mount -t tmpfs t /run && mkdir /run/network
    "$@"' "$work" "$@" >"$work/log" 2>&1
  ip -n "$router" -6 address show dev e0 | grep -q 2001:db8::1/64
  ip netns exec "$router" cat /proc/sys/net/ipv6/conf/e0/accept_ra
  ip netns del "$router"
}
first=$(up "$work/root/sbin/ifup" --no-scripts e0)
[ "$first" = 0 ] || { echo "changed: ifupdown leaves accept_ra $first"; cat "$work/log"; exit 1; }
rm -rf "$work/root" "$work/packages" # both have /sbin/ifup
unpack bookworm ifupdown2=3.0.0-1.1
second=$(up python3 "$work/root/sbin/ifup" -a)
[ "$second/$(wc -c <"$work/log")" = 1/0 ] || { echo "changed: accept_ra $second after ifupdown2"; cat "$work/log"; exit 1; }
echo "as found: accept_ra is 0 after ifupdown, 1 after ifupdown2, without a word"
