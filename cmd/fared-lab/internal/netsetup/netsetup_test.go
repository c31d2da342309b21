package netsetup

import (
	"strings"
	"testing"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/internal/testkit/netnstest"
)

func parse(t *testing.T, text string) *config.Config {
	t.Helper()
	c, err := config.Parse("test.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

const server = `
as: 4200001000
loopbacks: [10.255.0.1/32, "2001:db8::1/128"]
accept: [10.255.0.0/16, "2001:db8::/64"]
planes:
  - name: p0
    sub_ports:
      - device: p0.0
        speed: 400M
        sessions:
          - {peer: 10.1.1.3, local: 10.1.1.2}
          - {peer: "2001:db8:1::3", local: "2001:db8:1::2"}
      - device: p0.1
        sessions: [{peer: "fe80::1"}]
`

// apply applies a configuration inside a namespace.
func apply(t *testing.T, n *netnstest.Namespace, text string, o Options) error {
	t.Helper()
	c := parse(t, text)
	return n.Do(func() error { return Apply(c, o) })
}

// TestApply checks addresses, devices and rates; a second call changes nothing, and earlier settings stay.
func TestApply(t *testing.T) {
	netnstest.Require(t, "tc", "ping")
	a, b := netnstest.New(t), netnstest.New(t)
	netnstest.Veth(t, a, "p0.0", b, "s1.0")
	netnstest.Veth(t, a, "p0.1", b, "s1.1")
	b.Addr("s1.0", "10.1.1.3/31")
	b.IP("link", "set", "s1.1", "up")
	a.IP("link", "set", "lo", "down")
	a.IP("address", "add", "192.0.2.1/32", "dev", "lo")
	for range 2 {
		if err := apply(t, a, server, Options{Limit: true}); err != nil {
			t.Fatal(err)
		}
	}
	got := a.IP("-brief", "address")
	for _, want := range []string{"127.0.0.1/8", "192.0.2.1/32", "10.255.0.1/32", "2001:db8::1/128", "10.1.1.2 peer 10.1.1.3/32", "2001:db8:1::2 peer 2001:db8:1::3/128"} {
		if strings.Count(got, want) != 1 {
			t.Errorf("%s is not there once:\n%s", want, got)
		}
	}
	if up := strings.Count(a.IP("-brief", "link"), "LOWER_UP"); up != 3 {
		t.Errorf("%d of lo and two sub-ports are up:\n%s", up, a.IP("-brief", "link"))
	}
	out := a.Run("tc", "qdisc", "show")
	// 10 ms of 400 Mbit/s are 500 kB.
	if !strings.Contains(string(out), "tbf 1: dev p0.0 root refcnt 3 rate 400Mbit burst 500000b lat 50ms") {
		t.Errorf("the rate is not 400 Mbit/s:\n%s", out)
	}
	if strings.Contains(string(out), "tbf 1: dev p0.1") {
		t.Errorf("a sub-port without a configured speed is limited:\n%s", out)
	}
	// The peer can reach the address, whatever its prefix.
	if _, err := a.Output("ping", "-c", "1", "-W", "5", "10.1.1.3"); err != nil {
		t.Error(err)
	}
}

func TestApplyWithoutLimit(t *testing.T) {
	netnstest.Require(t, "tc")
	a, b := netnstest.New(t), netnstest.New(t)
	netnstest.Veth(t, a, "p0.0", b, "s1.0")
	netnstest.Veth(t, a, "p0.1", b, "s1.1")
	if err := apply(t, a, server, Options{}); err != nil {
		t.Fatal(err)
	}
	if out, err := a.Output("tc", "qdisc", "show"); err != nil || strings.Contains(string(out), "tbf") {
		t.Errorf("%v:\n%s", err, out)
	}
}

// TestApplySaysAll checks that all errors are returned at once, each with its place, and that all valid parts are set
// up.
func TestApplySaysAll(t *testing.T) {
	netnstest.Require(t)
	a, b := netnstest.New(t), netnstest.New(t)
	netnstest.Veth(t, a, "p0.0", b, "s1.0")
	text := strings.Replace(server, "{peer: 10.1.1.3, local: 10.1.1.2}", "{peer: 10.1.1.3}", 1) + "      - {device: p0.2, netns: other, sessions: [{peer: 10.1.1.5}]}\n"
	err := apply(t, a, text, Options{})
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		"planes[0].sub_ports[0]: sessions[0] has no local address: add local",
		"planes[0].sub_ports[1]: p0.1: Link not found",
		"planes[0].sub_ports[2]: p0.2 is in the network namespace other; only devices of this namespace can be set up",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error lacks %q:\n%v", want, err)
		}
	}
	if n := strings.Count(err.Error(), "\n"); n != 2 {
		t.Errorf("%d lines, want 3:\n%v", n+1, err)
	}
	if got := a.IP("-brief", "address"); !strings.Contains(got, "2001:db8:1::2") || !strings.Contains(got, "10.255.0.1/32") {
		t.Errorf("what could be set up is not:\n%s", got)
	}
}
