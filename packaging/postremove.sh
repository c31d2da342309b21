#!/bin/sh
# After a removal; a purge of a deb also removes configuration, state, user and groups.
set -e
if [ "$1" = purge ]; then
  rm -rf /etc/fared /run/fared /run/fared-dataplane /var/lib/fared /var/lib/private/fared /var/lib/fared-fleet
  if getent passwd fared >/dev/null; then
    userdel fared || echo "fared: the user fared has processes, and remains" >&2
  fi
  for group in fared fared-dataplane; do
    if getent group "$group" >/dev/null; then
      groupdel "$group" || echo "fared: the group $group remains" >&2
    fi
  done
fi
if [ -d /run/systemd/system ]; then
  systemctl daemon-reload
fi
