package config

import (
	"strings"
	"testing"
)

func TestWarnings(t *testing.T) {
	for keys, want := range map[string]string{
		"encoding: link-bandwidth":                        "",
		"transitive: false":                               "path_bandwidth.transitive",
		"encoding: extended-community":                    "",
		"encoding: extended-community, transitive: false": "",
		"encoding: extended-community, fare_type: 0x8f":   "path_bandwidth.fare_type",
		"encoding: link-bandwidth, fare_type: 0x8f":       "",
	} {
		c := parsed(t, before+"path_bandwidth: {"+keys+"}\n")
		got := strings.Join(c.Warnings(), "\n")
		if want == "" && got != "" || !strings.HasPrefix(got, want) {
			t.Errorf("%s: warnings %q, want those of %q", keys, got, want)
		}
	}
}
