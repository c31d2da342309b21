package config

import (
	"errors"
	"strings"
	"testing"
)

func parsed(t *testing.T, text string) *Config {
	t.Helper()
	c, err := Parse("test", []byte(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return c
}

const before = `as: 4200000001
router_id: 10.255.0.1
loopbacks: [10.255.0.1/32]
accept: [10.255.0.0/16]
planes:
  - name: p0
    sub_ports:
      - {device: eth0, speed: 400G, sessions: [{peer: 10.0.0.0}]}
      - {device: eth1, sessions: [{peer: 10.0.0.2}]}
`

// TestDiff checks for each edit of a file which changes a reload makes, or which values need a restart.
func TestDiff(t *testing.T) {
	for _, test := range []struct {
		name        string
		old, new    string // replaced in the file
		add         string // appended
		live, fixed string
	}{
		{name: "nothing"},
		{name: "spelling", old: "speed: 400G", new: "speed: 0.4T", add: "bgp: {hold_time: 9000ms}\n"},
		{name: "loopbacks", old: "[10.255.0.1/32]", new: "[10.255.0.1/32, 10.255.0.2/32]", live: "loopbacks: [10.255.0.1/32] -> [10.255.0.1/32, 10.255.0.2/32]"},
		{name: "accept", old: "[10.255.0.0/16]", new: "[10.255.0.0/17]", fixed: "accept: [10.255.0.0/16] -> [10.255.0.0/17]"},
		{name: "speed set", old: "eth1,", new: "eth1, speed: 200G,", live: "planes[0].sub_ports[1].speed: none -> 200G"},
		{name: "speed removed", old: " speed: 400G,", live: "planes[0].sub_ports[0].speed: 400G -> none"},
		{name: "everything live", old: "speed: 400G", new: "speed: 200G", add: `drain_delay: 1s
path_bandwidth: {missing: skip, all_missing: equal, all_zero: unreachable, increase_hold_up: 2s}
log: {level: warn}
proof: {unproved: avoid, avoid_after: 2s}
`, live: `drain_delay: 5s -> 1s
log.level: info -> warn
path_bandwidth.all_missing: local -> equal
path_bandwidth.all_zero: equal -> unreachable
path_bandwidth.increase_hold_up: 0s -> 2s
path_bandwidth.missing: local -> skip
planes[0].sub_ports[0].speed: 400G -> 200G
proof.avoid_after: 400ms -> 2s
proof.unproved: report -> avoid`},
		{name: "as", old: "4200000001", new: "4200000002", fixed: "as: 4200000001 -> 4200000002"},
		{name: "all fixed ones are listed, and live ones are not", old: "router_id: 10.255.0.1", new: "router_id: 10.255.0.9", add: `log: {level: debug, format: json}
weights: {mode: per-packet, slots: 4}
api: {socket: /run/other.sock}
bgp: {hold_time: 30s}
`, fixed: `api.read_only_socket: /run/fared/fared-ro.sock -> /run/other-ro.sock
api.socket: /run/fared/fared.sock -> /run/other.sock
bgp.hold_time: 9s -> 30s
bgp.keepalive_interval: 3s -> 10s
drains.file: /var/lib/fared/drains -> /run/other.drains
log.format: text -> json
router_id: 10.255.0.1 -> 10.255.0.9
slots.file: /run/fared/table/slots -> /run/other.slots
weights.mode: per-flow -> per-packet
weights.slots: 0 -> 4`},
		{name: "sub-port removed", old: "      - {device: eth1, sessions: [{peer: 10.0.0.2}]}\n", live: "planes[0].sub_ports[1]: eth1 -> none"},
		{name: "session added", old: "{peer: 10.0.0.2}", new: "{peer: 10.0.0.2}, {peer: 10.0.0.4}", live: "planes[0].sub_ports[1].sessions[1]: none -> p0/eth1#2"},
		{name: "sub-ports in another order", old: "device: eth0, speed: 400G, sessions: [{peer: 10.0.0.0}]}\n      - {device: eth1, sessions: [{peer: 10.0.0.2}]", new: "device: eth1, sessions: [{peer: 10.0.0.2}]}\n      - {device: eth0, speed: 400G, sessions: [{peer: 10.0.0.0}]",
			live: "planes[0].sub_ports: [eth0, eth1] -> [eth1, eth0]"},
		{name: "plane renamed", old: "name: p0", new: "name: q0", live: "planes[0]: p0 -> none\nplanes[0]: none -> q0"},
		{name: "session removed by its sub-port", old: "{peer: 10.0.0.2}", new: "{unnumbered: true}", live: `planes[0].sub_ports[1].sessions[0].extended_next_hop: false -> true
planes[0].sub_ports[1].sessions[0].families: [ipv4] -> [ipv4, ipv6]
planes[0].sub_ports[1].sessions[0].peer: 10.0.0.2 -> none
planes[0].sub_ports[1].sessions[0].unnumbered: false -> true`},
		{name: "tls", add: "api: {listen: \"127.0.0.1:7778\", tls: {cert_file: a, key_file: b, client_ca_file: c}}\n",
			fixed: "api.listen: none -> 127.0.0.1:7778\napi.tls: none -> present"},
		{name: "role", old: "as:", new: "role: leaf\nas:", add: "dataplane: {address: \"unix:/run/fared-dataplane/dataplane.sock\"}\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			old := parsed(t, before)
			text := before
			if test.old != "" {
				if !strings.Contains(text, test.old) {
					t.Fatalf("the file does not contain %q", test.old)
				}
				text = strings.Replace(text, test.old, test.new, 1)
			}
			if test.name == "role" { // a leaf has no loopbacks: the only live difference is not applied
				text = strings.Replace(text, "loopbacks: [10.255.0.1/32]\n", "", 1)
				test.fixed = "role: server -> leaf\nslots.file: /run/fared/table/slots -> none"
			}
			changes, err := Diff(old, parsed(t, text+test.add))
			if test.fixed != "" {
				var restart *RestartError
				if !errors.As(err, &restart) || changes != nil {
					t.Fatalf("Diff = %v, %v; want a RestartError", changes, err)
				}
				if got := restart.Changes.String(); got != test.fixed {
					t.Errorf("needs a restart:\n%s\nwant:\n%s", got, test.fixed)
				}
				for _, c := range restart.Changes {
					if !strings.Contains(err.Error(), c.Path+": ") {
						t.Errorf("%q does not name %s", err, c.Path)
					}
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := changes.String(); got != test.live {
				t.Errorf("changes:\n%s\nwant:\n%s", got, test.live)
			}
			for _, c := range changes {
				if !changes.Has(c.Kind) || c.Kind == "" {
					t.Errorf("%v has no kind", c)
				}
			}
		})
	}
}

func TestDiffAO(t *testing.T) {
	with := func(ao *TCPAO) *Config {
		c := parsed(t, before)
		c.Planes[0].SubPorts[0].Sessions[0].TCPAO = ao
		return c
	}
	const at = "planes[0].sub_ports[0].sessions[0].tcp_ao"
	old := TCPAO{KeyFile: "/etc/fared/p0.key", Key: "old-secret", Algorithm: HMACSHA1}
	for want, change := range map[string]func(ao *TCPAO) *TCPAO{
		".key_file: its key -> another key":            func(ao *TCPAO) *TCPAO { ao.Key = "new-secret"; return ao },
		".send_id: 0 -> 1":                             func(ao *TCPAO) *TCPAO { ao.SendID = 1; return ao },
		".algorithm: hmac-sha-1-96 -> aes-128-cmac-96": func(ao *TCPAO) *TCPAO { ao.Algorithm = AES128CMAC; return ao },
		": present -> none":                            func(*TCPAO) *TCPAO { return nil },
	} {
		other := old
		if changes, err := Diff(with(&old), with(change(&other))); err != nil || changes.String() != at+want {
			t.Errorf("Diff = %v, %v, want %s", changes, err, at+want)
		}
	}
	other := old
	other.Key = ""
	if changes, err := Diff(with(&old), with(&other)); err != nil || len(changes) > 0 {
		t.Errorf("Diff with a key that Parse does not load = %v, %v", changes, err)
	}
}

func TestDiffPasswords(t *testing.T) {
	with := func(password string) *Config {
		c := parsed(t, before)
		c.Planes[0].SubPorts[0].Sessions[0].PasswordFile = "/etc/fared/p0.password"
		c.Planes[0].SubPorts[0].Sessions[0].Password = password
		return c
	}
	changes, err := Diff(with("old-secret"), with("new-secret"))
	const want = "planes[0].sub_ports[0].sessions[0].password_file: its password -> another password"
	if err != nil || changes.String() != want {
		t.Errorf("Diff = %v, %v, want %s", changes, err, want)
	}
	for _, other := range []string{"old-secret", ""} { // Parse loads none, as in a recording
		if changes, err := Diff(with("old-secret"), with(other)); err != nil || len(changes) > 0 {
			t.Errorf("Diff with %q = %v, %v", other, changes, err)
		}
	}
}

// TestDiffBFDKeys checks that a reload replaces the keys of BFD, also if only the content of a file has changed, and
// never shows a key; the type, and authentication as a whole, need a restart.
func TestDiffBFDKeys(t *testing.T) {
	with := func(auth *BFDAuth) *Config {
		c := parsed(t, before)
		c.BFD.Auth = auth
		return c
	}
	auth := func(kind string, keys ...BFDKey) *BFDAuth { return &BFDAuth{Type: kind, Keys: keys} }
	one, changed, two := BFDKey{1, "/a", "secret-one"}, BFDKey{1, "/a", "secret-new"}, BFDKey{2, "/b", "secret-two"}
	for _, c := range []struct {
		old, new    *BFDAuth
		live, fixed string
	}{
		{auth(BFDKeyedMD5, one), auth(BFDKeyedMD5, one), "", ""},
		{auth(BFDKeyedMD5, one), auth(BFDKeyedMD5, one, two), "bfd.auth.keys: [1 from /a] -> [1 from /a, 2 from /b]", ""},
		{auth(BFDKeyedMD5, one, two), auth(BFDKeyedMD5, two, one), "bfd.auth.keys: [1 from /a, 2 from /b] -> [2 from /b, 1 from /a]", ""},
		{auth(BFDKeyedMD5, one), auth(BFDKeyedMD5, changed), "bfd.auth.keys: its keys -> other keys", ""},
		{auth(BFDKeyedMD5, one), auth(BFDKeyedMD5, BFDKey{1, "/a", ""}), "", ""},
		{auth(BFDKeyedMD5, one), auth(BFDKeyedSHA1, two), "", "bfd.auth.type: keyed-md5 -> keyed-sha1"},
		{nil, auth(BFDKeyedSHA1, two), "", "bfd.auth: none -> present"},
		{auth(BFDKeyedSHA1, two), nil, "", "bfd.auth: present -> none"},
	} {
		changes, err := Diff(with(c.old), with(c.new))
		fixed := ""
		if restart := (*RestartError)(nil); errors.As(err, &restart) {
			fixed = restart.Changes.String()
		}
		if changes.String() != c.live || fixed != c.fixed || c.live != "" && !changes.Has(ChangeBFDKeys) {
			t.Errorf("%v to %v: changes %q, restart %q; want %q, %q", c.old, c.new, changes, fixed, c.live, c.fixed)
		}
	}
}
