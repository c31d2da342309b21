# Sourced by findings: FRR of a Debian suite, unpacked into a temporary folder, in a network namespace. Needs root and the mirror of Debian.
# shellcheck shell=bash
work=$(mktemp -d)
chmod 755 "$work"
router=finding-$$-router peers=finding-$$-peers
pids=()
clean() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  wait
  ip netns del "$router" 2>/dev/null || true
  ip netns del "$peers" 2>/dev/null || true
  rm -rf "$work"
}
trap clean EXIT

# unpack SUITE PACKAGE=VERSION...: the packages and the libraries that they need.
unpack() {
  local suite=$1
  shift
  mkdir -p "$work"/apt/{lists/partial,cache/archives/partial} "$work/packages" "$work/root"
  touch "$work/apt/status"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $suite main" >"$work/apt/sources.list"
  printf '%s\n' "Dir::Etc::sourcelist \"$work/apt/sources.list\";" 'Dir::Etc::sourceparts "-";' "Dir::State \"$work/apt\";" \
    "Dir::State::status \"$work/apt/status\";" "Dir::Cache \"$work/apt/cache\";" 'APT::Sandbox::User "root";' >"$work/apt/conf"
  export APT_CONFIG=$work/apt/conf
  apt-get update -qq
  local libraries
  libraries=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances "${@%%=*}" |
    grep -E '^(lib|zlib1g)' | sort -u)
  # shellcheck disable=SC2086 # one word a package
  (cd "$work/packages" && apt-get download -qq "$@" $libraries)
  local package
  for package in "$work"/packages/*.deb; do dpkg -x "$package" "$work/root"; done
}

# program PATH ARGUMENT...: runs a program of the suite with its loader and libraries, in the router's namespace.
program() {
  local libraries=$work/root/usr/lib/x86_64-linux-gnu
  [ -e "$libraries/ld-linux-x86-64.so.2" ] || libraries=$work/root/lib/x86_64-linux-gnu
  # FRR requires that its user is in the group frrvty. The mount is that of the command alone.
  { grep -v '^frrvty:' /etc/group || true; echo frrvty:x:996:root; } >"$work/group"
  # shellcheck disable=SC2016 # expanded by the inner shell
  exec ip netns exec "$router" sh -c 'mount --bind "$0" /etc/group && exec "$@"' "$work/group" "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries:$work/root/usr/lib/x86_64-linux-gnu:$work/root/usr/lib/x86_64-linux-gnu/frr" "$work/root/$1" "${@:2}"
}

# start CONFIGURATION [DAEMON]: zebra, the other daemon and bgpd at 10.6.0.1; peers may have 10.6.0.2 to 10.6.0.9.
start() {
  ip netns add "$router"
  ip netns add "$peers"
  ip link add r0 netns "$router" type veth peer name p0 netns "$peers"
  ip -n "$router" addr add 10.6.0.1/24 dev r0
  for i in 2 3 4 5 6 7 8 9; do ip -n "$peers" addr add "10.6.0.$i/24" dev p0; done
  for n in "$router" "$peers"; do ip -n "$n" link set lo up; done
  ip -n "$router" link set r0 up
  ip -n "$peers" link set p0 up
  mkdir "$work/run"
  echo "$1" >"$work/run/bgpd.conf"
  : >"$work/run/zebra.conf"
  [ -z "${2:-}" ] || : >"$work/run/$2.conf"
  local name
  for name in zebra ${2:-} bgpd; do
    program "usr/lib/frr/$name" -u root -g root -f "$work/run/$name.conf" -i "$work/run/$name.pid" -z "$work/run/zserv" --vty_socket "$work/run" \
      -A 127.0.0.1 -P 0 --log stdout >"$work/run/$name.log" 2>&1 &
    pids+=($!)
    for _ in {1..100}; do [ ! -S "$work/run/$name.vty" ] || break; sleep 0.1; done
    [ -S "$work/run/$name.vty" ] || { tail -5 "$work/run/$name.log" >&2; return 1; }
  done
}

# exchange SECONDS PEER...: lib/peer.py; its output is in $received.
exchange() {
  # shellcheck disable=SC2034 # read by the scripts
  received=$(ip netns exec "$peers" python3 "$(dirname "${BASH_SOURCE[0]}")/peer.py" 10.6.0.1 "$@")
}

# expect PATTERN TEXT: a line of $received that matches, or the finding has changed.
expect() {
  grep -qE "$1" <<<"$received" || { echo "changed: $2"; echo "$received"; exit 1; }
  echo "as found: $2"
}

# routed PATTERN: waits up to 30 s until the kernel's route to 10.255.0.2 matches.
routed() {
  local route
  for _ in {1..300}; do
    route=$(ip -n "$router" route show 10.255.0.2 | tr -d '\n')
    if grep -qE "$1" <<<"$route"; then return 0; fi
    sleep 0.1
  done
  echo "changed: the kernel's route is $route" >&2
  return 1
}

# flows: the next hop of each of 2,000 UDP flows, a line for each.
flows() {
  for port in {20001..22000}; do
    echo "route get 10.255.0.2 from 10.6.0.1 ipproto udp sport $port dport 4791"
  done | ip -n "$router" -batch - | grep -o 'via [0-9.]*'
}

# moved FILE FILE: percent of the flows that differ.
moved() { paste "$1" "$2" | awk '$2 != $4 { n++ } END { print int(100 * n / NR + 0.5) }'; }
