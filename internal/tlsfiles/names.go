package tlsfiles

import (
	"crypto/x509"
	"fmt"
	"strings"
)

// CheckName returns an error unless pattern is valid for Permits: "node7.example", "*.example" for all names below
// example, or "*" for every certificate of the authorities. The error has the remedy.
func CheckName(pattern string) error {
	name := strings.TrimPrefix(pattern, "*.")
	if pattern == "*" {
		return nil
	}
	if name == "" || strings.ContainsFunc(name, func(r rune) bool { return r == '*' || r < ' ' }) || strings.TrimSpace(name) != name || strings.HasPrefix(name, ".") {
		return fmt.Errorf("%q is not a name of a certificate: write one such as node7.example, *.example for all names below example, or * for every certificate", pattern)
	}
	return nil
}

// Names returns the names of a certificate: its DNS names or, without any, its common name (RFC 6125, Section 6.4.4),
// which may be "". There is at least one.
func Names(c *x509.Certificate) []string {
	if len(c.DNSNames) > 0 {
		return c.DNSNames
	}
	return []string{c.Subject.CommonName}
}

// Permits reports whether one of the names of a certificate matches one of the patterns of CheckName. Case does not
// count (RFC 6125, Section 6.4.1). Without names it returns false.
func Permits(patterns, names []string) bool {
	for _, pattern := range patterns {
		for _, name := range names {
			if matches(pattern, name) {
				return true
			}
		}
	}
	return false
}

func matches(pattern, name string) bool {
	if suffix, below := strings.CutPrefix(pattern, "*"); below {
		return len(name) > len(suffix) && strings.EqualFold(name[len(name)-len(suffix):], suffix) || pattern == "*"
	}
	return strings.EqualFold(pattern, name)
}
