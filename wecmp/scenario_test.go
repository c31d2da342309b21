package wecmp

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite testdata with what the engine says; commit only what you understand")

// TestScenarios runs the scenarios in testdata. A scenario is a sequence of blocks separated by empty lines; a block is
// commands, a line "----", and their output. All blocks share one engine. Lines that start with # are comments.
//
//	config planes=4 sub-ports=2 [slots= policy= mode= addressing= ordering= hash=linux|crc32]
//	group ID CAPACITY...          capacity of each plane; 400/1:0 adds its sub-ports' weights
//	delete-group ID
//	destination PREFIX GROUP      group 0 deletes
//	limits MAXWEIGHT MAXSUM
//	updates                       prints and applies the updates
//	weights PREFIX                2:2:1:2, or the reason
//	shares PREFIX                 per slot
//	vector ID                     prints the vector
//	ports SOURCE PREFIX
func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scenarios in testdata: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			s := &scenario{m: newMirror()}
			var out []string
			checked := 0
			for block := range strings.SplitSeq(strings.TrimSpace(string(data)), "\n\n") {
				commands, _, compares := strings.Cut(block, "\n----")
				var got strings.Builder
				for line := range strings.Lines(commands) {
					if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
						s.command(t, &got, strings.Fields(line))
					}
				}
				if compares {
					checked++
					commands += "\n----"
					if got.Len() > 0 {
						commands += "\n" + strings.TrimRight(got.String(), "\n")
					}
				} else if got.Len() > 0 {
					t.Fatalf("a block prints and has no ----:\n%s", block)
				}
				if !*update && commands != block {
					t.Errorf("scenario:\n%s\n\nthe engine says:\n%s", block, commands)
				}
				out = append(out, commands)
			}
			if checked == 0 {
				t.Fatal("nothing is compared")
			}
			if *update {
				must(t, os.WriteFile(file, []byte(strings.Join(out, "\n\n")+"\n"), 0o644))
			}
		})
	}
}

type scenario struct {
	e *Engine
	m *mirror
}

func (s *scenario) command(t *testing.T, out *strings.Builder, f []string) {
	t.Helper()
	number := func(text string) uint64 {
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			t.Fatalf("%v: %v", f, err)
		}
		return n
	}
	report := func(err error) {
		if err != nil {
			fmt.Fprintf(out, "error: %v\n", err)
		}
	}
	vector := func() VectorView {
		id, _ := s.e.Destination(netip.MustParsePrefix(f[1]))
		v, ok := s.e.Vector(id)
		if !ok {
			t.Fatalf("%v: no such destination", f)
		}
		return v
	}
	switch f[0] {
	case "config":
		s.e, s.m = mustEngine(t, scenarioConfig(t, f[1:])), newMirror()
	case "group":
		var planes []Capacity
		for p, text := range f[2:] {
			capacity, weights, ok := strings.Cut(text, "/")
			c := Capacity{Capacity: number(capacity) * 1e9}
			c.Bandwidth = c.Capacity
			for range s.e.cfg.Planes[p].SubPorts {
				c.SubPorts = append(c.SubPorts, 1)
			}
			if ok {
				c.SubPorts = nil
				for w := range strings.SplitSeq(weights, ":") {
					c.SubPorts = append(c.SubPorts, number(w))
				}
			}
			planes = append(planes, c)
		}
		report(s.e.SetGroup(uint32(number(f[1])), planes))
	case "delete-group":
		report(s.e.DeleteGroup(uint32(number(f[1]))))
	case "destination":
		report(s.e.SetDestination(netip.MustParsePrefix(f[1]), uint32(number(f[2]))))
	case "limits":
		report(s.e.SetLimits(uint32(number(f[1])), uint32(number(f[2]))))
	case "updates":
		s.m.apply(t, s.e)
		for _, u := range s.e.updates {
			fmt.Fprintln(out, u)
		}
	case "weights":
		v := vector()
		if !v.Reachable {
			fmt.Fprintln(out, v.Reason)
			return
		}
		fmt.Fprintln(out, strings.ReplaceAll(strings.Trim(fmt.Sprint(v.Weights), "[]"), " ", ":"))
	case "shares":
		for i, slot := range vector().Slots {
			if i > 0 {
				out.WriteByte(' ')
			}
			fmt.Fprint(out, slot.SharePPB)
		}
		out.WriteByte('\n')
	case "vector":
		v, _ := s.e.Vector(uint32(number(f[1])))
		out.WriteString(v.String())
	case "ports":
		dst := netip.MustParsePrefix(f[2])
		id, _ := s.e.Destination(dst)
		v, _ := s.e.Vector(id)
		ports, how := s.e.Planner().Ports(netip.MustParseAddr(f[1]), dst.Addr(), v.Places(), nil)
		fmt.Fprintln(out, how, strings.Trim(fmt.Sprint(ports), "[]"))
	default:
		t.Fatalf("%q is no command", f[0])
	}
}

func scenarioConfig(t *testing.T, settings []string) Config {
	t.Helper()
	value := map[string]string{}
	for _, s := range settings {
		k, v, _ := strings.Cut(s, "=")
		value[k] = v
	}
	number := func(key string) int {
		n, err := strconv.Atoi(value[key])
		if err != nil {
			t.Fatalf("config %v: %v", settings, err)
		}
		return n
	}
	cfg := square(number("planes"), number("sub-ports"))
	delete(value, "planes")
	delete(value, "sub-ports")
	for k, v := range value {
		switch k {
		case "slots":
			cfg.Slots = number(k)
		case "policy":
			must(t, cfg.Policy.UnmarshalText([]byte(v)))
		case "mode":
			must(t, cfg.Mode.UnmarshalText([]byte(v)))
		case "addressing":
			must(t, cfg.Addressing.UnmarshalText([]byte(v)))
		case "ordering":
			must(t, cfg.Ordering.UnmarshalText([]byte(v)))
		case "hash":
			hash, ok := map[string]Hasher{"linux": LinuxL4{Seed: 1}, "crc32": CRC32{}}[v]
			if !ok {
				t.Fatalf("config: no hash %q", v)
			}
			cfg.Hash = hash
		default:
			t.Fatalf("config: no setting %q", k)
		}
	}
	return cfg
}
