package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// contract is the required output of `fared weights -o json` for one destination.
type contract struct {
	destination, source string
	planes              []uint64 // weights, lowest terms
	subPorts            int
}

// member is one key of a JSON object, in the order of the text.
type member struct {
	key   string
	value any // []member, []any, json.Number, string, bool
}

// parse reads JSON and keeps the order of keys, and the text of numbers.
func parse(d *json.Decoder) (any, error) {
	token, err := d.Token()
	if err != nil {
		return nil, err
	}
	switch token {
	case json.Delim('{'):
		out := []member{}
		for d.More() {
			key, err := d.Token()
			if err != nil {
				return nil, err
			}
			value, err := parse(d)
			if err != nil {
				return nil, err
			}
			out = append(out, member{key.(string), value})
		}
		_, err := d.Token()
		return out, err
	case json.Delim('['):
		out := []any{}
		for d.More() {
			value, err := parse(d)
			if err != nil {
				return nil, err
			}
			out = append(out, value)
		}
		_, err := d.Token()
		return out, err
	}
	return token, nil
}

// shape walks parsed JSON and reports violations of the contract.
type shape struct{ t *testing.T }

// object returns the values of the promised keys, which must be in order; other keys may stand between them.
func (s shape) object(where string, v any, keys ...string) map[string]any {
	s.t.Helper()
	members, ok := v.([]member)
	if !ok {
		s.t.Fatalf("%s is %T, want an object", where, v)
	}
	out := map[string]any{}
	var promised []string
	for _, m := range members {
		if _, twice := out[m.key]; twice {
			s.t.Errorf("%s has %q twice", where, m.key)
		}
		out[m.key] = m.value
		if slices.Contains(keys, m.key) {
			promised = append(promised, m.key)
		}
	}
	if !slices.Equal(promised, keys) {
		s.t.Fatalf("%s has the keys %q, want %q", where, promised, keys)
	}
	return out
}

func (s shape) list(where string, v any) []any {
	s.t.Helper()
	list, ok := v.([]any)
	if !ok {
		s.t.Fatalf("%s is %T, want a list", where, v)
	}
	return list
}

// integer accepts digits alone: no string, no fraction, no exponent.
func (s shape) integer(where string, v any) uint64 {
	s.t.Helper()
	n, ok := v.(json.Number)
	if !ok {
		s.t.Fatalf("%s is %T %v, want an integer", where, v, v)
	}
	u, err := strconv.ParseUint(n.String(), 10, 64)
	if err != nil {
		s.t.Fatalf("%s: %v", where, err)
	}
	return u
}

func (s shape) text(where string, v any) string {
	s.t.Helper()
	text, ok := v.(string)
	if !ok {
		s.t.Fatalf("%s is %T, want a string", where, v)
	}
	return text
}

func (s shape) boolean(where string, v any) bool {
	s.t.Helper()
	b, ok := v.(bool)
	if !ok {
		s.t.Fatalf("%s is %T, want true or false", where, v)
	}
	return b
}

// checkContract compares the output of `fared weights -o json` with the promises to scripts.
func checkContract(t *testing.T, text string, want contract) {
	t.Helper()
	s := shape{t}
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	parsed, err := parse(d)
	if err != nil {
		t.Fatalf("%v in:\n%s", err, text)
	}
	if d.More() {
		t.Fatalf("more than one value:\n%s", text)
	}
	top := s.object("the answer", parsed, "revision", "destinations")
	if s.integer("revision", top["revision"]) == 0 {
		t.Error("revision 0 is never used")
	}
	list := s.list("destinations", top["destinations"])
	if len(list) != 1 {
		t.Fatalf("%d destinations, want 1:\n%s", len(list), text)
	}
	dst := s.object("destination", list[0], "destination", "reachable", "planes", "pairs")
	if got := s.text("destination", dst["destination"]); got != want.destination {
		t.Errorf("destination %s, want %s", got, want.destination)
	}
	if !s.boolean("reachable", dst["reachable"]) {
		t.Error("not reachable")
	}
	var weights []uint64
	for i, p := range s.list("planes", dst["planes"]) {
		plane := s.object("plane", p, "plane", "weight", "bandwidth_bps", "in_effect", "sub_ports")
		if got := s.text("plane", plane["plane"]); got != fmt.Sprintf("p%d", i) {
			t.Errorf("plane %d is %q", i, got)
		}
		weight, bps := s.integer("weight", plane["weight"]), s.integer("bandwidth_bps", plane["bandwidth_bps"])
		if (weight == 0) != (bps == 0) {
			t.Errorf("plane %d has weight %d of %d bit/s", i, weight, bps)
		}
		if !s.boolean("in_effect", plane["in_effect"]) {
			t.Errorf("plane %d is not in effect", i)
		}
		weights = append(weights, weight)
		subPorts := s.list("sub_ports", plane["sub_ports"])
		if len(subPorts) != want.subPorts {
			t.Errorf("%d sub-ports, want %d", len(subPorts), want.subPorts)
		}
		for _, sp := range subPorts {
			sub := s.object("sub_port", sp, "device", "weight")
			s.text("device", sub["device"])
			s.integer("weight", sub["weight"])
		}
	}
	if !slices.Equal(weights, want.planes) {
		t.Errorf("weights %v, want %v in lowest terms", weights, want.planes)
	}
	pairs := s.list("pairs", dst["pairs"])
	if len(pairs) != 1 {
		t.Fatalf("%d pairs, want 1", len(pairs))
	}
	pair := s.object("pair", pairs[0], "source", "slots")
	if got := s.text("source", pair["source"]); got != want.source {
		t.Errorf("source %s, want %s", got, want.source)
	}
	var sum uint64
	ports := map[uint64]bool{}
	shares := map[string]uint64{}
	slots := s.list("slots", pair["slots"])
	if len(slots) != len(want.planes)*want.subPorts {
		t.Errorf("%d slots, want one per sub-port", len(slots))
	}
	for i, v := range slots {
		slot := s.object("slot", v, "slot", "plane", "device", "source_port", "share_ppb")
		if got := s.integer("slot", slot["slot"]); got != uint64(i) {
			t.Errorf("slot %d has number %d", i, got)
		}
		s.text("device", slot["device"])
		port := s.integer("source_port", slot["source_port"])
		if port < 49152 || port > 65535 || ports[port] {
			t.Errorf("slot %d has port %d: outside 49152 to 65535, or twice", i, port)
		}
		ports[port] = true
		share := s.integer("share_ppb", slot["share_ppb"])
		sum += share
		shares[s.text("plane", slot["plane"])] += share
	}
	if sum != 1_000_000_000 {
		t.Errorf("shares sum to %d", sum)
	}
	var total uint64
	for _, w := range want.planes {
		total += w
	}
	for i, w := range want.planes {
		exact := w * 1_000_000_000 / total
		if got := shares[fmt.Sprintf("p%d", i)]; got < exact || got > exact+1 {
			t.Errorf("plane %d carries %d ppb, want %d/%d of it", i, got, w, total)
		}
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, []byte(text)); err != nil {
		t.Fatal(err)
	}
	if prefix := fmt.Sprintf(`{"revision":%d,"destinations":[{"destination":"%s","reachable":true,"planes":[{"plane":"p0","weight":%d,"bandwidth_bps":`,
		s.integer("revision", top["revision"]), want.destination, want.planes[0]); !strings.HasPrefix(compact.String(), prefix) {
		t.Errorf("the answer begins\n%.200s\nwant\n%s", compact.String(), prefix)
	}
}
