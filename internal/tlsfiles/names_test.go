package tlsfiles

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"strings"
	"testing"
)

// TestPermits checks which certificates match which patterns: DNS names before the common name, without case, and a
// suffix only at a label.
func TestPermits(t *testing.T) {
	for _, c := range []struct {
		pattern string
		common  string
		dns     []string
		want    bool
	}{
		{"node7.example", "", []string{"node7.example"}, true},
		{"node7.example", "", []string{"other.example", "NODE7.Example"}, true},
		{"node7.example", "", []string{"node77.example"}, false},
		{"node7.example", "", []string{"node7.example.org"}, false},
		{"*.example", "", []string{"node7.example"}, true},
		{"*.example", "", []string{"a.b.Example"}, true},
		{"*.example", "", []string{"example"}, false},
		{"*.example", "", []string{".example"}, false},
		{"*.example", "", []string{"badexample"}, false},
		{"*.example", "", []string{"node7.example.evil"}, false},
		{"alice", "alice", nil, true},
		{"alice", "bob", nil, false},
		{"alice", "alice", []string{"bob.example"}, false}, // the common name does not count next to DNS names
		{"node7.example", "", []string{"*.example"}, false},
		{"*", "", nil, true},
		{"*", "any", []string{"thing"}, true},
		{"", "", nil, false},
	} {
		names := Names(&x509.Certificate{Subject: pkix.Name{CommonName: c.common}, DNSNames: c.dns})
		patterns := []string{"first.invalid"}
		if c.pattern != "" {
			patterns = append(patterns, c.pattern)
		}
		if got := Permits(patterns, names); got != c.want {
			t.Errorf("%q permits %q %q: %v, want %v", c.pattern, c.common, c.dns, got, c.want)
		}
	}
	if Permits([]string{"*", ""}, nil) {
		t.Error("a caller without a certificate matches")
	}
}

func TestCheckName(t *testing.T) {
	for _, ok := range []string{"node7.example", "alice", "*.example", "*", "Alice Smith"} {
		if err := CheckName(ok); err != nil {
			t.Errorf("%q: %v", ok, err)
		}
	}
	for _, bad := range []string{"", "*.", "*example", "a*.example", "**", "*.*", " alice", "a\n", "*..example", ".example"} {
		if err := CheckName(bad); err == nil || !strings.Contains(err.Error(), "*.example for all names") {
			t.Errorf("%q: %v, want the remedy", bad, err)
		}
	}
}
