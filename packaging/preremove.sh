#!/bin/sh
# Before a removal, not before an upgrade: ends the daemons, and takes their nexthops, routes and programs out of the kernel, which no process maintains from then on.
set -e
[ "$1" = remove ] || [ "$1" = 0 ] || exit 0
if [ -d /run/systemd/system ]; then
  systemctl disable --now fared-report.service fared.service fared-dataplane.service 2>/dev/null || true
fi
# Programs must not find a table that no process maintains. The directory stays for containers that have mounted it, until a purge.
rm -f /run/fared/slots /run/fared/table/slots
# The journal of the agent, which its flags may place elsewhere, names all its objects. The flush fails without an agent's objects or rights, for example in a container.
flags=$(sed -n 's/^FARED_DATAPLANE_FLAGS=//p' /etc/default/fared-dataplane 2>/dev/null | tail -n 1 | tr -d "\"'")
set -f # words, no patterns of files
# shellcheck disable=SC2086
/usr/bin/fared dataplane $flags --flush || /usr/bin/fared dataplane --flush || echo "fared: objects of the agent may remain in the kernel" >&2
