package linux

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// table is a reference model of a resilient kernel group without an idle timer (net/ipv4/nexthop.c:
// nh_res_group_rebalance, nh_res_table_upkeep, remove_nh_grp_entry).
type table struct {
	members []rtnl.Member
	buckets []uint32 // 0 without an owner
}

// replace sets the members of the group.
func (t *table) replace(members []rtnl.Member) {
	t.members = slices.Clone(members)
	count := map[uint32]int{}
	for i, id := range t.buckets {
		if !slices.ContainsFunc(members, func(m rtnl.Member) bool { return m.ID == id }) {
			t.buckets[i] = 0
			continue
		}
		count[id]++
	}
	total, sum, before := 0, 0, 0
	for _, m := range members {
		total += int(m.Weight)
	}
	wants := map[uint32]int{}
	var under []uint32 // the last one is served first
	for _, m := range members {
		sum += int(m.Weight)
		bound := (len(t.buckets)*sum + total/2) / total
		wants[m.ID] = bound - before
		before = bound
		if count[m.ID] < wants[m.ID] {
			under = append(under, m.ID)
		}
	}
	for i, id := range t.buckets {
		if id != 0 && count[id] <= wants[id] {
			continue
		}
		to := under[len(under)-1]
		count[id]--
		count[to]++
		t.buckets[i] = to
		if count[to] == wants[to] {
			under = under[:len(under)-1]
		}
	}
}

// remove removes nexthops one by one, as when their device loses its carrier.
func (t *table) remove(ids []uint32) {
	for _, id := range ids {
		left := slices.DeleteFunc(slices.Clone(t.members), func(m rtnl.Member) bool { return m.ID == id })
		if len(left) < len(t.members) {
			t.replace(left)
		}
	}
}

// racer is a group whose sub-ports lose and regain carriers without the knowledge of the dealing side, in the kernel or
// in the model.
type racer struct {
	t       testing.TB
	l       layout
	s       scaling
	random  *rand.Rand
	kernel  racing
	owner   map[uint32]int // of every id ever created
	pool    [][]uint32     // as known to the dealing side
	next    uint32
	current []segment // as known to the dealing side; nil if unknown
	members []rtnl.Member
	weights []uint32
	up      []bool // as known to the dealing side
}

// racing executes the decisions of racer.
type racing interface {
	make(id uint32, subPort int)
	set(members []rtnl.Member, create bool) bool // false if refused
	lose(subPort int)
	regain(subPort int)
	buckets() []uint32
}

const racerDrop = 1

func newRacer(t testing.TB, random *rand.Rand, l layout, kernel racing) *racer {
	r := &racer{
		t: t, l: l, s: newScaling(l.buckets, 65535), random: random, kernel: kernel, owner: map[uint32]int{}, next: racerDrop,
		pool: make([][]uint32, l.subPorts), weights: make([]uint32, l.subPorts), up: slices.Repeat([]bool{true}, l.subPorts),
	}
	return r
}

// deal sends the message that brings the group from its known state to weights. lost sub-ports lose their carrier
// before the message; flapped ones have also regained it by then, and neither event has arrived. It reports whether the
// message was executed.
func (r *racer) deal(weights []uint32, lost, flapped []int) bool {
	r.t.Helper()
	taken := map[uint32]bool{}
	for _, m := range r.members {
		taken[m.ID] = true
	}
	var makes []uint32
	fresh := func(subPort int) uint32 {
		for _, id := range r.pool[subPort] {
			if !taken[id] {
				taken[id] = true
				return id
			}
		}
		r.next++
		id := r.next
		r.owner[id] = subPort
		r.pool[subPort] = append(r.pool[subPort], id)
		taken[id] = true
		makes = append(makes, id)
		return id
	}
	owner := func(id uint32) int { return r.owner[id] }
	d := r.s.deal(r.current, r.l.runs(weights), owner, func(id uint32) int { return r.owner[id] + 1 }, fresh)
	if target := r.l.runs(weights); r.current != nil && !r.l.firm(d.segments, target) {
		d = r.s.dealAll(target, fresh)
	}
	for _, i := range append(slices.Clone(lost), flapped...) {
		r.kernel.lose(i)
	}
	for _, i := range flapped {
		r.kernel.regain(i)
	}
	for _, id := range makes {
		r.kernel.make(id, r.owner[id]) // refused without a carrier
	}
	members := append(d.members, rtnl.Member{ID: racerDrop, Weight: 1})
	carried := r.kernel.set(members, r.members == nil)
	if carried {
		r.current, r.members, r.weights = d.segments, members, weights
		if got := segmentsOf(r.kernel.buckets()); !slices.Equal(got, d.segments) {
			r.t.Fatalf("weights %v, lost %v, flapped %v:\nkernel %v\nplan   %v", weights, lost, flapped, got, d.segments)
		}
	}
	return carried
}

// hear applies lost carriers: the objects of their pools are deleted.
func (r *racer) hear(subPorts ...int) {
	for _, i := range subPorts {
		r.pool[i], r.up[i] = nil, false
		for _, c := range r.current {
			if r.owner[c.id] == i {
				r.current = nil // the kernel has moved buckets
				break
			}
		}
	}
}

// lasting fails unless every sub-port in hold owns its last buckets, as many as each of the weights gives it. After the
// kernel has dealt on its own, one nexthop object after the other, small quotas may lack some until the next deal.
func (r *racer) lasting(hold func(subPort int) bool, dealt bool, weights ...[]uint32) {
	r.t.Helper()
	buckets := r.kernel.buckets()
	for i := range r.l.subPorts {
		_, end := r.l.home(i)
		keeps := r.l.lasting()
		for _, w := range weights {
			if q := r.l.quotas(w)[i]; dealt {
				keeps = min(keeps, q)
			} else if q < 2*r.l.lasting() {
				keeps = 0
			}
		}
		for b := end - keeps; b < end && hold(i); b++ {
			if owner, ok := r.owner[buckets[b]]; !ok || owner != i {
				r.t.Fatalf("bucket %d of sub-port %d's lasting ones is #%d's", b, i, owner)
			}
		}
	}
}

// run executes random changes of weights, with carriers lost and flapping between the decision and the message, and
// after it.
func (r *racer) run(rounds int) (refused int) {
	pick := func(odds int) (subPorts []int) {
		for i, up := range r.up {
			if up && r.random.IntN(odds) == 0 {
				subPorts = append(subPorts, i)
			}
		}
		return subPorts
	}
	n := r.l.subPorts
	for range rounds {
		for i, up := range r.up {
			if !up && r.random.IntN(2) == 0 {
				r.kernel.regain(i)
				r.up[i] = true
			}
		}
		weights := slices.Clone(r.weights)
		most := []int{2, 4, 100}[r.random.IntN(3)]
		for i := range weights {
			if r.random.IntN(2) == 0 {
				weights[i] = uint32(r.random.IntN(most))
			}
			if !r.up[i] {
				weights[i] = 0
			}
		}
		if r.l.runs(weights) == nil {
			continue // the blackhole takes over
		}
		before := slices.Clone(r.weights)
		lost := pick(2 * n)
		flapped := slices.DeleteFunc(pick(2*n), func(i int) bool { return slices.Contains(lost, i) })
		known := r.members != nil && r.current != nil
		carried := r.deal(weights, lost, flapped)
		holds := func(i int) bool {
			return weights[i] > 0 && before[i] > 0 && !slices.Contains(lost, i) && !slices.Contains(flapped, i)
		}
		if known || carried {
			r.lasting(holds, carried, weights, before)
		}
		// The events arrive now, and the group is redistributed. Pools of flapped sub-ports are empty, but the
		// sub-ports are up.
		r.hear(append(slices.Clone(lost), flapped...)...)
		for _, i := range flapped {
			r.up[i] = true
		}
		for _, i := range lost {
			weights[i] = 0
		}
		if !carried {
			refused++
			if len(lost)+len(flapped) == 0 {
				r.t.Fatalf("weights %v: refused, and no carrier was lost", weights)
			}
			r.current = nil
			if r.l.runs(weights) == nil {
				r.weights = weights
				continue
			}
			if !r.deal(weights, nil, nil) {
				r.t.Fatalf("weights %v: refused again", weights)
			}
			r.lasting(holds, true, weights, before)
		}
		r.weights = weights
		// A carrier is lost at rest: the other sub-ports keep their buckets.
		lost = pick(4 * n)
		for _, i := range lost {
			r.kernel.lose(i)
		}
		if r.current != nil {
			r.lasting(func(i int) bool { return weights[i] > 0 && !slices.Contains(lost, i) }, false, weights)
		}
		r.hear(lost...)
		for _, i := range lost {
			r.weights[i] = 0
		}
	}
	return refused
}

// modeled executes the decisions in the model.
type modeled struct {
	table
	random *rand.Rand
	exists map[uint32]int // by sub-port
	down   map[int]bool
	size   int
}

func (m *modeled) make(id uint32, subPort int) {
	if !m.down[subPort] {
		m.exists[id] = subPort
	}
}

func (m *modeled) set(members []rtnl.Member, create bool) bool {
	for _, member := range members {
		if _, ok := m.exists[member.ID]; !ok {
			return false
		}
	}
	if create {
		m.table.buckets = make([]uint32, m.size)
	}
	m.replace(members)
	return true
}

func (m *modeled) lose(subPort int) {
	m.down[subPort] = true
	var ids []uint32
	for _, id := range slices.Sorted(maps.Keys(m.exists)) {
		if m.exists[id] == subPort {
			ids = append(ids, id)
			delete(m.exists, id)
		}
	}
	m.random.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	m.remove(ids)
}

func (m *modeled) regain(subPort int) { delete(m.down, subPort) }

func (m *modeled) buckets() []uint32 { return m.table.buckets }

// TestNoRaceMovesLastingBuckets checks that a message sent before lost carriers are known has the planned result or is
// refused.
func TestNoRaceMovesLastingBuckets(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	refused := 0
	for range gate.Count(t, gate.Models, 150, 2000) {
		n := 1 + random.IntN(9)
		m := &modeled{random: random, exists: map[uint32]int{racerDrop: -1}, down: map[int]bool{}, size: 1024}
		if random.IntN(2) == 0 {
			m.size = 128 * n
		}
		refused += newRacer(t, random, layout{m.size, n}, m).run(40)
	}
	if refused == 0 {
		t.Error("no message met a group that had changed")
	}
	t.Logf("%d messages met a group that had changed", refused)
}

// real executes the decisions in the kernel, with veths.
type real struct {
	t    testing.TB
	h    *netnstest.Namespace
	conn *rtnl.Conn
	dev  []int
	size int
}

const racerGroup = 1 << 20

func (k *real) do(fill func(*rtnl.Batch)) error {
	b := k.conn.Begin()
	fill(b)
	return k.conn.Do(b)[0]
}

func (k *real) make(id uint32, subPort int) {
	_ = k.do(func(b *rtnl.Batch) {
		b.SetNexthop(rtnl.Nexthop{ID: id, Gateway: netip.AddrFrom4([4]byte{198, 18, byte(subPort), 2}), Device: k.dev[subPort], OnLink: true}, rtnl.Create)
	})
}

func (k *real) set(members []rtnl.Member, create bool) bool {
	flags := uint16(rtnl.Change)
	if create {
		flags = rtnl.Create
	}
	return k.do(func(b *rtnl.Batch) {
		b.SetNexthop(rtnl.Nexthop{ID: racerGroup, Members: members, Resilient: true, Buckets: uint16(k.size)}, flags)
	}) == nil
}

func (k *real) lose(subPort int)   { k.h.IP("link", "set", fmt.Sprintf("p%d", subPort), "down") }
func (k *real) regain(subPort int) { k.h.IP("link", "set", fmt.Sprintf("p%d", subPort), "up") }

func (k *real) buckets() []uint32 {
	k.t.Helper()
	buckets, err := k.conn.Buckets(racerGroup)
	if err != nil {
		k.t.Fatal(err)
	}
	return buckets
}

// TestNoRaceMovesLastingBucketsInTheKernel runs the same test in the kernel.
func TestNoRaceMovesLastingBucketsInTheKernel(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	const n = 4
	h := newHost(t, n)
	k := &real{t: t, h: h.Namespace, conn: h.conn, size: 1024}
	links, err := h.conn.Links()
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		at := slices.IndexFunc(links, func(l rtnl.Link) bool { return l.Name == fmt.Sprintf("p%d", i) })
		k.dev = append(k.dev, links[at].Index)
	}
	if err := k.do(func(b *rtnl.Batch) {
		b.SetNexthop(rtnl.Nexthop{ID: racerDrop, Family: unix.AF_INET, Device: 1}, rtnl.Create)
	}); err != nil {
		t.Fatal(err)
	}
	refused := newRacer(t, random, layout{k.size, n}, k).run(150)
	if refused == 0 {
		t.Error("no message met a group that had changed")
	}
	t.Logf("%d messages met a group that had changed", refused)
}

// TestTwinIsTheKernel replaces a group by random members and removes some, in the kernel and in the model.
func TestTwinIsTheKernel(t *testing.T) {
	netnstest.Require(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	k := &real{t: t, h: netnstest.New(t), dev: []int{1}, size: 1000}
	k.h.Must(func() (err error) { k.conn, err = rtnl.Dial(); return err })
	defer k.conn.Close()
	twin := table{buckets: make([]uint32, k.size)}
	const ids = 12
	for round := range gate.Count(t, gate.Kernel, 100, 300) {
		if random.IntN(3) > 0 || len(twin.members) < 3 {
			var members []rtnl.Member
			for _, i := range random.Perm(ids)[:1+random.IntN(ids)] {
				k.make(uint32(i+1), 0)
				members = append(members, rtnl.Member{ID: uint32(i + 1), Weight: uint32(1 + random.IntN(500))})
			}
			if !k.set(members, round == 0) {
				t.Fatal("refused")
			}
			twin.replace(members)
		} else {
			id := twin.members[random.IntN(len(twin.members))].ID
			if err := k.do(func(b *rtnl.Batch) { b.DelNexthop(id) }); err != nil {
				t.Fatal(err)
			}
			twin.remove([]uint32{id})
		}
		if got := k.buckets(); !slices.Equal(got, twin.buckets) {
			t.Fatalf("round %d, members %v:\nkernel %v\ntwin   %v", round, twin.members, segmentsOf(got), segmentsOf(twin.buckets))
		}
	}
}
