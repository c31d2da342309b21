package status

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// TestFilterLikeContains checks that a filter selects the destinations that any of its prefixes contains, in order,
// once, from any position on.
func TestFilterLikeContains(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 3))
		e := edit{build: 1, shared: true}
		var all []Key
		layout := &Layout{Groups: []LayoutGroup{{Sources: []netip.Prefix{netip.MustParsePrefix("10.255.0.1/32")}}, {Sources: []netip.Prefix{netip.MustParsePrefix("10.255.0.2/32")}}}}
		for range rng.IntN(600) {
			p := Key{prefixAt(rng.IntN(2000)).Prefix, rng.IntN(2)}
			e.set(&destination{key: p, revision: 1})
			all = append(all, p)
		}
		slices.SortFunc(all, compareKeys)
		all = slices.Compact(all)
		var given []string
		var covering []netip.Prefix
		for range rng.IntN(8) {
			p := prefixAt(rng.IntN(2000)).Prefix
			if rng.IntN(3) > 0 {
				p = netip.PrefixFrom(p.Addr(), p.Bits()-rng.IntN(p.Bits()+1)).Masked()
			}
			given, covering = append(given, p.String()), append(covering, p)
		}
		var sources []string
		if rng.IntN(2) == 0 {
			sources = []string{"10.255.0.2"}
		}
		f, err := parseFilter("filter", &farev1.WeightFilter{Destinations: given, Sources: sources}, nil, layout)
		if err != nil {
			t.Fatal(err)
		}
		var after Key
		if rng.IntN(2) == 0 {
			after = Key{prefixAt(rng.IntN(2000)).Prefix, rng.IntN(2)}
		}
		var want []Key
		for _, p := range all {
			selected := len(covering) == 0 || slices.ContainsFunc(covering, func(c netip.Prefix) bool { return c.Contains(p.Addr()) })
			selected = selected && (sources == nil || p.Source == 1)
			if f.matches(p) != selected {
				t.Fatalf("seed %d: matches(%v) = %v with %s", seed, p, !selected, given)
			}
			if selected && (!after.IsValid() || compareKeys(p, after) > 0) {
				want = append(want, p)
			}
		}
		var got []Key
		for d := range f.selected(e.pages, after, 0) {
			got = append(got, d.key)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("seed %d: filter %s after %v:\n got %v\nwant %v", seed, given, after, got, want)
		}
	}
}

func TestFilterRefuses(t *testing.T) {
	layout := &Layout{Groups: []LayoutGroup{{Sources: []netip.Prefix{netip.MustParsePrefix("10.255.0.1/32")}}}}
	for _, c := range []struct {
		name   string
		filter *farev1.WeightFilter
		want   []string // substrings of the error
	}{
		{"not an address", &farev1.WeightFilter{Destinations: []string{"10.255.0.2", "gpu2"}}, []string{"filter.destinations[1]", `"gpu2"`, "write 10.255.0.2"}},
		{"host bits", &farev1.WeightFilter{Destinations: []string{"10.255.0.5/16"}}, []string{"filter.destinations[0]", "write 10.255.0.0/16"}},
		{"zone", &farev1.WeightFilter{Destinations: []string{"fe80::1%eth0"}}, []string{"zone"}},
		{"mapped prefix", &farev1.WeightFilter{Destinations: []string{"::ffff:10.0.0.0/104"}}, []string{"write it as IPv4"}},
		{"foreign source", &farev1.WeightFilter{Sources: []string{"10.255.0.2"}}, []string{"filter.sources[0]", "use 10.255.0.1/32"}},
		{"covering source", &farev1.WeightFilter{Sources: []string{"10.255.0.0/16"}}, []string{"filter.sources[0]", "with /32"}},
		{"all at once", &farev1.WeightFilter{Destinations: []string{"a", "b"}, Sources: []string{"c"}}, []string{"destinations[0]", "destinations[1]", "sources[0]"}},
	} {
		_, err := parseFilter("filter", c.filter, nil, layout)
		if err == nil {
			t.Errorf("%s: no error", c.name)
			continue
		}
		for _, want := range c.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %q lacks %q", c.name, err, want)
			}
		}
	}
	f, err := parseFilter("filter", &farev1.WeightFilter{Destinations: []string{"::ffff:10.255.0.2"}, Sources: []string{"10.255.0.1", "10.255.0.1/32"}}, nil, layout)
	if err != nil || len(f.sources) != 1 || f.destinations[0].String() != "10.255.0.2/32" {
		t.Errorf("mapped address and repeated source: %+v, %v", f, err)
	}
}
