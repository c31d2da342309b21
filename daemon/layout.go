package daemon

import (
	"net/netip"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// layout numbers the configuration's planes, sub-ports and sessions; all other parts refer to these by index. The order is the configuration's.
type layout struct {
	planes   []string
	ofPlane  [][]int // by plane: indexes of its sub-ports
	subPorts []layoutSubPort
	sessions []layoutSession
	sources  []sourceLayout // at least one; empty in the layout of a source group
}

type layoutSubPort struct {
	config.SubPort
	plane   int
	inPlane int // index within the plane
}

type layoutSession struct {
	config.Session
	subPort  int
	plane    int
	codec    fare.Codec
	families [2]bool // IPv4, IPv6
}

func newLayout(cfg *config.Config) layout {
	l := wholeLayout(cfg)
	groups := cfg.SourceGroups()
	for _, g := range groups {
		s := l.serving(g)
		if len(groups) > 1 {
			s.name = g.Loopbacks[0]
		}
		l.sources = append(l.sources, s)
	}
	return l
}

func wholeLayout(cfg *config.Config) layout {
	var l layout
	for p, plane := range cfg.Planes {
		l.planes, l.ofPlane = append(l.planes, plane.Name), append(l.ofPlane, nil)
		for k, sp := range plane.SubPorts {
			for _, s := range sp.Sessions {
				ls := layoutSession{Session: s, subPort: len(l.subPorts), plane: p}
				ls.codec = fare.Codec{
					Encoding: cfg.PathBandwidth.Encoding, FAREType: cfg.PathBandwidth.FAREType, FARESubType: cfg.PathBandwidth.FARESubType,
					Format: s.Format, AS: cfg.AS, Min: plane.Minimum, Max: plane.Maximum,
					NonTransitive: !cfg.PathBandwidth.Transitive, Administrator: cfg.PathBandwidth.Administrator,
				}
				for _, f := range s.Families {
					if f == config.IPv6 {
						ls.families[1] = true
					} else {
						ls.families[0] = true
					}
				}
				l.sessions = append(l.sessions, ls)
			}
			l.ofPlane[p] = append(l.ofPlane[p], len(l.subPorts))
			l.subPorts = append(l.subPorts, layoutSubPort{SubPort: sp, plane: p, inPlane: k})
		}
	}
	return l
}

// deciding returns the guard's callback for a route with too many communities.
func deciding(codec fare.Codec) func([][8]byte) int {
	return func(raw [][8]byte) int {
		communities := make([]fare.Community, len(raw))
		for i := range raw {
			communities[i] = raw[i]
		}
		return codec.Deciding(communities)
	}
}

// carries reports whether a session carries a prefix's address family.
func (s *layoutSession) carries(p netip.Prefix) bool {
	if p.Addr().Is4() {
		return s.families[0]
	}
	return s.families[1]
}

func (l *layout) fareConfig(cfg *config.Config) fare.Config {
	policy := cfg.PathBandwidth.Policies()
	out := fare.Config{Planes: l.planes, Role: cfg.Role, Missing: policy.Missing, AllMissing: policy.AllMissing, AllZero: policy.AllZero, Conflict: policy.Conflict}
	for _, sp := range l.subPorts {
		out.SubPorts = append(out.SubPorts, fare.SubPort{Device: sp.Device, Plane: sp.plane, Speed: sp.Speed, Uplink: sp.ShareGroup() != ""})
	}
	for _, s := range l.sessions {
		out.Sessions = append(out.Sessions, fare.Session{Name: s.Name, SubPort: s.subPort, Codec: s.codec})
	}
	return out
}

func (l *layout) engineConfig(cfg *config.Config) wecmp.Config {
	w := cfg.Weights
	out := wecmp.Config{
		Mode: w.Mode, Policy: w.Policy, Addressing: w.Addressing, Slots: w.Slots, Ordering: w.Ordering, Hash: w.Hash.Hasher(),
		MaxWeight: w.MaxWeight, MaxWeightSum: w.MaxWeightSum,
	}
	out.Protocol, out.Port = cfg.Dataplane.Flows()
	if cfg.Role == fare.RoleLeaf {
		// No queue pair begins at a leaf. Per-packet mode has the fewest possible slots, one per plane, and they are not published.
		out = wecmp.Config{Mode: wecmp.PerPacket, MaxWeight: w.MaxWeight, MaxWeightSum: w.MaxWeightSum}
	}
	for p, name := range l.planes {
		plane := wecmp.Plane{Name: name}
		for _, sp := range l.subPorts {
			if sp.plane == p {
				plane.SubPorts = append(plane.SubPorts, wecmp.SubPort{Name: sp.Device})
			}
		}
		out.Planes = append(out.Planes, plane)
	}
	return out
}

// subPortByDevice returns the index of a device's sub-port, or -1.
func (l *layout) subPortByDevice(device string) int {
	for i := range l.subPorts {
		if l.subPorts[i].Device == device {
			return i
		}
	}
	return -1
}

// devices returns the sub-ports' devices in configuration order.
func (l *layout) devices() []string {
	var out []string
	for i := range l.subPorts {
		out = append(out, l.subPorts[i].Device)
	}
	return out
}
