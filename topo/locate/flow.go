package locate

// flows counts the probes of all source groups in one direction, by plane and group.
type flows struct {
	all  [][]float64
	sub  map[[3]int]float64 // by plane, group and sub-port, from 1; those of any sub-port have 0
	each [][]float64        // toward each other group
	sum  []float64          // of each, by plane
}

func newFlows(planes, groups int) *flows {
	f := &flows{sub: map[[3]int]float64{}, sum: make([]float64, planes)}
	for range planes {
		f.all, f.each = append(f.all, make([]float64, groups)), append(f.each, make([]float64, groups))
	}
	return f
}

func (f *flows) add(s Sent, peers int) {
	f.all[s.Plane][s.From] += s.Probes
	f.sub[[3]int{s.Plane, s.From, s.Sub}] += s.Probes
	each := s.Probes / float64(max(peers, 1))
	f.each[s.Plane][s.From] += each
	f.sum[s.Plane] += each
}

// toward returns the probes of all others toward a group.
func (f *flows) toward(plane, group int) float64 { return f.sum[plane] - f.each[plane][group] }

// expose computes how many probes pass each suspect.
func (t *trial) expose(sent []Sent) {
	f := t.fabric
	forth, back := newFlows(f.Planes, len(f.Groups())), newFlows(f.Planes, len(f.Groups()))
	for _, s := range sent {
		if s.Plane < 0 || s.Plane >= f.Planes || s.From < 0 || s.From >= len(f.Groups()) {
			continue
		}
		peers := s.Peers
		if peers == 0 {
			peers = len(f.Groups()) - f.GroupsEach()
		}
		if s.Direction != Back {
			forth.add(s, peers)
		}
		if s.Direction != Forth {
			back.add(s, peers)
		}
	}
	for k, s := range t.suspects {
		switch k.kind {
		case pair: // has its own
		case server:
			for _, g := range f.GroupsAt(k.a) {
				s.exposure += t.atServer(forth, back, key{nic, k.side, g, 0, -1})
			}
		case halfCable, oneCable, nic:
			s.exposure = t.atServer(forth, back, k)
		default:
			s.exposure = t.inside(forth, k) + t.inside(back, k)
		}
	}
}

// atServer returns the number of packets that pass a cable, half of one, or all cables of a group: probes leave and
// their answers arrive, others' probes arrive and their answers leave.
func (t *trial) atServer(forth, back *flows, k key) (sum float64) {
	if k.plane < 0 {
		for p := range t.fabric.Planes {
			sum += t.atServer(forth, back, key{oneCable, k.side, k.a, 0, p})
		}
		return sum
	}
	subs := float64(len(t.fabric.Groups()[k.a].Planes[k.plane]))
	if k.kind != halfCable {
		subs = 1
	}
	if k.side == ToServer {
		return (back.all[k.plane][k.a] + forth.toward(k.plane, k.a)) / subs
	}
	own := forth.all[k.plane][k.a]
	if k.kind == halfCable {
		own = forth.sub[[3]int{k.plane, k.a, k.b}] + forth.sub[[3]int{k.plane, k.a, 0}]/subs
	}
	return own + back.toward(k.plane, k.a)/subs
}

// inside returns the number of packets of flows that pass a leaf, an uplink or a spine. The direction of the flows does
// not matter: all of these parts are passed both ways.
func (t *trial) inside(flow *flows, k key) (sum float64) {
	f := t.fabric
	leaves, at := t.leafOf[k.plane], k.a
	count := map[int]int{}
	for _, of := range leaves {
		count[of]++
	}
	for g, all := range flow.all[k.plane] {
		each := flow.each[k.plane][g]
		switch own := leaves[g]; {
		case k.kind == spine:
			sum += each * float64(len(leaves)-count[own]) / float64(f.Spines)
		case own < 0: // wired to all leaves
			sum += all / float64(f.Leaves)
		case k.kind == leaf && own == at:
			sum += all
		case own == at:
			sum += each * float64(len(leaves)-count[own]) / float64(f.Spines)
		case k.kind == leaf && f.Spines > 0:
			sum += each * float64(count[at])
		case k.kind == uplink:
			sum += each * float64(count[at]) / float64(f.Spines)
		}
	}
	return sum
}
