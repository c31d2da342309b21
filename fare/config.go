package fare

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
)

// Limits of a [Config].
const (
	MaxPlanes   = 64
	MaxSubPorts = 64   // per plane of a server; a leaf's ports are bounded by its sessions
	MaxSessions = 4096 // altogether
)

// Config is what a [Table] is made for. The zero value is a table without
// planes, in which nothing is reachable.
type Config struct {
	Planes   []string // names; the index is the plane
	SubPorts []SubPort
	Sessions []Session
	Missing  MissingPolicy
	AllZero  ZeroPolicy
	Role     Role
}

// SubPort is one physical lane of a plane.
type SubPort struct {
	Device string    // name, for [Description] only
	Plane  int       // index
	Speed  Bandwidth // 0: unknown until a [LinkState] tells
}

// Session is one BGP session over one sub-port.
type Session struct {
	Name    string // unique
	SubPort int    // index
	Codec   Codec
}

// ErrConfig is what every error of [NewTable] wraps.
var ErrConfig = errors.New("invalid configuration of the path-bandwidth table")

// validate finds every error at once.
func (c *Config) validate() error {
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }

	if len(c.Planes) > MaxPlanes {
		wrong("planes: %d, at most %d", len(c.Planes), MaxPlanes)
	}
	names := make(map[string]int)
	for i, name := range c.Planes {
		if name == "" {
			wrong("planes[%d]: give it a name", i)
		} else if first, ok := names[name]; ok {
			wrong("planes[%d]: %q is already the name of planes[%d]", i, name, first)
		}
		names[name] = i
	}
	perPlane := make([]int, len(c.Planes))
	for i, sp := range c.SubPorts {
		if sp.Speed > MaxBandwidth {
			wrong("sub-ports[%d]: speed %d bit/s, at most %d", i, uint64(sp.Speed), uint64(MaxBandwidth))
		}
		if sp.Plane < 0 || sp.Plane >= len(c.Planes) {
			wrong("sub-ports[%d]: plane %d of %d", i, sp.Plane, len(c.Planes))
			continue
		}
		if perPlane[sp.Plane]++; perPlane[sp.Plane] == MaxSubPorts+1 && c.Role == RoleServer {
			wrong("sub-ports[%d]: plane %q has more than %d", i, c.Planes[sp.Plane], MaxSubPorts)
		}
	}
	if len(c.Sessions) > MaxSessions {
		wrong("sessions: %d, at most %d", len(c.Sessions), MaxSessions)
	}
	clear(names)
	for i, s := range c.Sessions {
		if s.SubPort < 0 || s.SubPort >= len(c.SubPorts) {
			wrong("sessions[%d]: sub-port %d of %d", i, s.SubPort, len(c.SubPorts))
		}
		if s.Name == "" {
			wrong("sessions[%d]: give it a name", i)
		} else if first, ok := names[s.Name]; ok {
			wrong("sessions[%d]: %q is already the name of sessions[%d]", i, s.Name, first)
		}
		names[s.Name] = i
		if err := s.Codec.Validate(); err != nil {
			wrong("sessions[%d]: %w", i, err)
		}
	}
	if int(c.Missing) >= len(missingNames) {
		wrong("missing bandwidth policy: %s", c.Missing)
	}
	if int(c.AllZero) >= len(zeroNames) {
		wrong("all zero policy: %s", c.AllZero)
	}
	if int(c.Role) >= len(roleNames) {
		wrong("role: %s", c.Role)
	}
	if errs != nil {
		return fmt.Errorf("%w: %w", ErrConfig, errors.Join(errs...))
	}
	return nil
}

// rankRange is sessions [lo, hi) in rank order.
type rankRange struct{ lo, hi uint16 }

// ranks orders sessions by plane, sub-port and index, so that those of one
// sub-port, and those of one plane, are neighbours.
func (c *Config) ranks() []int {
	order := make([]int, len(c.Sessions))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int {
		x, y := c.Sessions[a].SubPort, c.Sessions[b].SubPort
		return cmp.Or(cmp.Compare(c.SubPorts[x].Plane, c.SubPorts[y].Plane), cmp.Compare(x, y), cmp.Compare(a, b))
	})
	return order
}
