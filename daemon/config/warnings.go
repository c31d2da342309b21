package config

import "github.com/fared/fared/fare"

// Warnings returns a sentence for each valid setting that fails behind some leaves, and for each loopback that no
// session advertises, with its remedy.
func (c *Config) Warnings() (out []string) {
	b := &c.PathBandwidth
	switch {
	case b.Encoding == fare.LinkBandwidth && !b.Transitive:
		out = append(out, "path_bandwidth.transitive: false: FRR 10.3.0 ignores this form of Link Bandwidth, and a leaf spreads equally over all routes to a prefix if one of them has no bandwidth; "+
			"use it only where no leaf reads the transitive form")
	case b.Encoding == fare.FARECommunity && b.FAREType%2 != 0:
		out = append(out, "path_bandwidth.fare_type: FRR 10.3.0 and 10.3.1 drop odd types toward other AS; use an even type, such as 0x8e")
	}
	return append(out, c.uncarried()...)
}
