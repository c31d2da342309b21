package backend

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/fared/fared/topo"
)

// kernelTable is the forwarding state of a server's kernel as iproute2 reads it, a program that shares no code with the
// data plane that wrote the state.
type kernelTable struct {
	rules   []kernelRule              // by preference
	routes  map[string]map[string]int // by table and destination: nexthop object of the route
	blocked map[string]map[string]bool
	buckets map[int]map[string]uint32 // by resilient group: number of buckets of each device
}

// The fields of the output of ip -j that are used here.
type (
	kernelRoute struct {
		Dst, Type, Table string // Table is empty for main
		NHID             int    `json:"nhid"`
	}
	kernelRule struct {
		Priority   int
		Src, Table string
		SrcLen     *int `json:"srclen"`
		// Further selectors. Rules for a port belong to a driver that steers by BPF, which the check of packets covers.
		FWMark, IIF, OIF, IPProto *string
		Goto                      *int
	}
	kernelNexthop struct {
		ID        int
		Dev       string
		Group     []struct{ ID int }
		Blackhole *struct{}
	}
)

// kernelBuckets counts buckets of resilient groups by group and nexthop.
type kernelBuckets map[int]map[int]uint32

func (b kernelBuckets) add(group, nexthop int) {
	if b[group] == nil {
		b[group] = map[int]uint32{}
	}
	b[group][nexthop]++
}

// askKernel makes ip print objects of a namespace, one query per line of a batch, and decodes each answer into its
// element of into.
func askKernel(ctx context.Context, ns Namespace, questions string, into ...any) error {
	out, err := run(ctx, questions, "ip", "-n", string(ns), "-j", "-batch", "-")
	if err != nil {
		return err
	}
	answers := json.NewDecoder(bytes.NewReader(out))
	for _, v := range into {
		if err := answers.Decode(v); err != nil {
			return fmt.Errorf("ip -j -batch (%q): %w", questions, err)
		}
	}
	return nil
}

func readKernel(ctx context.Context, ns Namespace) (*kernelTable, error) {
	var rules []kernelRule
	var routes []kernelRoute
	var nexthops []kernelNexthop
	if err := askKernel(ctx, ns, "rule show\nroute show table all\nnexthop show\n", &rules, &routes, &nexthops); err != nil {
		return nil, err
	}
	groups := map[int]bool{}
	for _, n := range nexthops {
		groups[n.ID] = len(n.Group) > 0
	}
	var used []int
	for _, r := range routes {
		if groups[r.NHID] && !slices.Contains(used, r.NHID) {
			used = append(used, r.NHID)
		}
	}
	buckets, err := readBuckets(ctx, ns, used)
	if err != nil {
		return nil, err
	}
	return newKernelTable(rules, routes, nexthops, buckets), nil
}

// readBuckets counts the buckets of groups. A group has up to 65,535 of them, so ip prints them as lines: decoding JSON
// takes several times as long.
func readBuckets(ctx context.Context, ns Namespace, groups []int) (kernelBuckets, error) {
	var questions strings.Builder
	for _, id := range groups {
		fmt.Fprintf(&questions, "nexthop bucket show id %d\n", id)
	}
	all := kernelBuckets{}
	if len(groups) == 0 {
		return all, nil
	}
	out, err := run(ctx, questions.String(), "ip", "-n", string(ns), "-batch", "-")
	if err != nil {
		return nil, err
	}
	for line := range bytes.Lines(out) {
		if err := all.parse(line); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// parse counts the bucket in a line of ip, such as "id 20 index 1 idle_time 0.32 nhid 11".
func (b kernelBuckets) parse(line []byte) error {
	group, nexthop := -1, -1
	for words := bytes.Fields(line); len(words) >= 2; words = words[2:] {
		to := &group
		switch string(words[0]) {
		case "id":
		case "nhid":
			to = &nexthop
		default:
			continue
		}
		var err error
		if *to, err = strconv.Atoi(string(words[1])); err != nil {
			return fmt.Errorf("ip nexthop bucket show: %q: %w", line, err)
		}
	}
	if group < 0 || nexthop < 0 {
		return fmt.Errorf("ip nexthop bucket show: %q names no group and nexthop", line)
	}
	b.add(group, nexthop)
	return nil
}

func newKernelTable(rules []kernelRule, routes []kernelRoute, nexthops []kernelNexthop, buckets kernelBuckets) *kernelTable {
	t := &kernelTable{rules: rules, routes: map[string]map[string]int{}, blocked: map[string]map[string]bool{}, buckets: map[int]map[string]uint32{}}
	device := map[int]string{}
	hole := map[int]bool{}
	for _, n := range nexthops {
		device[n.ID], hole[n.ID] = n.Dev, n.Blackhole != nil
	}
	for _, r := range routes {
		table := cmp.Or(r.Table, "main")
		if t.routes[table] == nil {
			t.routes[table], t.blocked[table] = map[string]int{}, map[string]bool{}
		}
		if _, shadowed := t.routes[table][r.Dst]; shadowed {
			continue // ip lists the route with the lowest metric first
		}
		t.routes[table][r.Dst] = r.NHID
		t.blocked[table][r.Dst] = r.Type == "blackhole" || r.Type == "unreachable" || hole[r.NHID]
	}
	for id, of := range buckets {
		t.buckets[id] = map[string]uint32{}
		for nexthop, n := range of {
			t.buckets[id][device[nexthop]] += n
		}
	}
	return t
}

// matches reports whether the rule applies to packets from src.
func (r kernelRule) matches(src netip.Addr) bool {
	if r.FWMark != nil || r.IIF != nil && *r.IIF != "lo" || r.OIF != nil || r.IPProto != nil || r.Goto != nil {
		return false
	}
	if r.Src == "" || r.Src == "all" {
		return true
	}
	at, err := netip.ParseAddr(r.Src)
	if err != nil {
		return false
	}
	bits := at.BitLen()
	if r.SrcLen != nil {
		bits = *r.SrcLen
	}
	return netip.PrefixFrom(at, bits).Contains(src)
}

// lookup returns the nexthop object for packets from src to dst: that of the first table with a route to it, in the
// order of the rules. blocked means that the packets are dropped, and routed is false if no table has a route.
func (t *kernelTable) lookup(src, dst netip.Addr) (id int, blocked, routed bool) {
	for _, r := range t.rules {
		if !r.matches(src) {
			continue
		}
		if id, routed := t.routes[r.Table][dst.String()]; routed {
			return id, t.blocked[r.Table][dst.String()], true
		}
	}
	return 0, false, false
}

// Toward returns the kernel's forwarding state for packets from src to dst.
func (t *kernelTable) Toward(src, dst netip.Addr) Route {
	id, blocked, routed := t.lookup(src, dst)
	r := Route{Nexthop: id, Devices: map[string]uint64{}}
	if !routed || blocked {
		r.Err = errNoRoute
	}
	for device, n := range t.buckets[id] {
		r.Devices[device] = uint64(n)
	}
	return r
}

func (b *real) Forwarding(ctx context.Context, server int) (Forwarding, error) {
	return readKernel(ctx, b.Namespace(b.Server[server].Name))
}

// Routes returns the destinations in a node's main routing table.
func (b *real) Routes(ctx context.Context, n *topo.Node) (map[string]bool, error) {
	var routes []kernelRoute
	if err := askKernel(ctx, b.Namespace(n.Name), "route show\n", &routes); err != nil {
		return nil, err
	}
	there := map[string]bool{}
	for _, r := range routes {
		there[r.Dst] = true
	}
	return there, nil
}
