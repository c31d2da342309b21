package config

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/fared/fared/daemon/config/internal/model"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// Values of Dataplane.Address for data planes inside the process.
const (
	MemoryDataplane = "memory:" // forwards nothing
	InsideDataplane = "inside:" // an agent
)

// Forwards reports whether fared drives a data plane: always at a server, and at a leaf that configures one. Without
// one a leaf only passes routes on, and its operator makes the kernel forward.
func (c *Config) Forwards() bool {
	return c.Role == fare.RoleServer || c.Dataplane.Address != MemoryDataplane
}

// validate checks a resolved configuration.
func validate(c *Config, p *problems) {
	p.fields(reflect.ValueOf(c).Elem(), "")
	p.timers(c)
	p.damping(&c.Links.Damping)
	p.pathBandwidth(c)
	if p.broken["role"] {
		return // all checks below depend on the role
	}
	p.identity(c)
	p.ranges(c)
	p.planes(c)
	p.weights(c)
	p.services(c)
}

// fields checks the constraints of the struct tags.
func (p *problems) fields(v reflect.Value, path string) {
	for _, f := range model.Fields(v.Type()) {
		fv, where := v.Field(f.Index), join(path, f.Key)
		if f.Optional {
			if fv.IsNil() {
				continue
			}
			fv = fv.Elem()
		}
		if f.Required && fv.IsZero() && !p.written(where) {
			p.add(where, "is missing", "write "+missing(&f))
			continue
		}
		if !f.List {
			p.field(fv, where, &f)
			continue
		}
		if n := fv.Len(); n < f.MinItems && (f.Required || n > 0 || f.Derived != "") {
			p.add(where, "has no elements", fmt.Sprintf("write %d to %d elements", f.MinItems, f.MaxItems))
		} else if n > f.MaxItems {
			p.add(where, fmt.Sprintf("has %d elements", n), fmt.Sprintf("use at most %d", f.MaxItems))
		}
		for i := range fv.Len() {
			p.field(fv.Index(i), item(where, i), &f)
		}
	}
}

func (p *problems) field(v reflect.Value, path string, f *model.Field) {
	if f.Object != nil {
		p.fields(v, path)
		return
	}
	text := f.Scalar.Format(v)
	if f.Scalar.Words != nil && !slices.Contains(f.Scalar.Words, text) {
		p.add(path, fmt.Sprintf("%v is not a known value", v), "use "+model.OneOf(f.Scalar.Words))
	}
	if v.IsZero() && f.Default == "" && f.Derived == "" && !p.written(path) {
		return // absent
	}
	if f.Derived != "" && p.places != nil && !p.written(path) {
		return // out of range only if the value on which it depends is
	}
	if below, above := f.Outside(v); below {
		p.add(path, text+" is below "+f.Min, "use "+f.Range())
	} else if above {
		p.add(path, text+" is above "+f.Max, "use "+f.Range())
	}
}

// missing describes the value of a required key.
func missing(f *model.Field) string {
	if f.List {
		return fmt.Sprintf("a list of %d to %d elements", f.MinItems, f.MaxItems)
	}
	return article(f.Scalar)
}

func (p *problems) identity(c *Config) {
	if !c.RouterID.IsValid() {
		if !p.partial("loopbacks") {
			p.add("router_id", "is missing and no loopback is IPv4", "write an IPv4 address that is unique in the fabric")
		}
	} else if !c.RouterID.Is4() || c.RouterID.IsUnspecified() {
		p.add("router_id", c.RouterID.String()+" is not a BGP identifier", "use an IPv4 address other than 0.0.0.0")
	}
	p.autonomousSystem("as", c.AS)
	if c.Role == fare.RoleLeaf && c.BGP.AllowOwnAS > 0 {
		p.add("bgp.allow_own_as", fmt.Sprintf("%d would let a leaf accept its own routes again", c.BGP.AllowOwnAS), "remove it, or use role: server")
	}
}

// autonomousSystem rejects the reserved AS numbers.
func (p *problems) autonomousSystem(path string, as uint32) {
	const use = "use the fabric's AS number, or a private one: 64512 to 65534, 4200000000 to 4294967294"
	switch {
	case as == 23456:
		p.add(path, "23456 is AS_TRANS (RFC 6793)", use)
	case as == 65535:
		p.add(path, "65535 is reserved (RFC 7300)", use)
	case as >= 65552 && as <= 131071:
		p.add(path, fmt.Sprintf("%d is reserved by IANA", as), use)
	}
}

// unfit returns why an address cannot be that of a loopback or peer, or "" if it can. Addresses in 127.0.0.0/8 and ::1
// are permitted: labs use them.
func unfit(a netip.Addr) string {
	switch {
	case a.Is4In6():
		return "is an IPv4-mapped IPv6 address"
	case a.IsUnspecified():
		return "is the unspecified address"
	case a.IsMulticast():
		return "is a multicast address"
	case a.Is4() && a.As4()[0] == 0:
		return "is in 0.0.0.0/8 (this network)"
	case a == netip.AddrFrom4([4]byte{255, 255, 255, 255}): // other addresses of 240.0.0.0/4 are unicast addresses to Linux
		return "is the broadcast address"
	}
	return ""
}

// remedy returns the remedy for an unfit address.
func remedy(a netip.Addr, otherwise string) string {
	if a.Is4In6() {
		return "write " + a.Unmap().String()
	}
	return otherwise
}

// local lists the ranges that have another meaning on every machine or link; no route may enter them.
var local = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("255.255.255.255/32"), netip.MustParsePrefix("::/127"),
	netip.MustParsePrefix("::ffff:0:0/96"), netip.MustParsePrefix("fe80::/10"), netip.MustParsePrefix("ff00::/8"),
}

// ranges checks the accepted ranges and the loopbacks in them.
func (p *problems) ranges(c *Config) {
	for i, r := range c.Accept {
		path := item("accept", i)
		switch {
		case !r.IsValid():
			continue
		case r.Addr().Is4In6():
			p.add(path, r.String()+" is an IPv4-mapped range", "write the IPv4 range")
			continue
		case r != r.Masked():
			p.add(path, r.String()+" has host bits set", "write "+r.Masked().String())
			continue
		case r.Bits() == 0:
			p.add(path, r.String()+" accepts every address", "name the ranges of the fabric's loopbacks")
			continue
		}
		if l := slices.IndexFunc(local, r.Overlaps); l >= 0 {
			p.add(path, fmt.Sprintf("%s has addresses in %s, which cannot be loopbacks", r, local[l]), "name the ranges of the fabric's loopbacks")
		}
		for j, other := range c.Accept[:i] {
			if other.IsValid() && other == other.Masked() && other.Bits() > 0 && other.Overlaps(r) {
				p.add(path, fmt.Sprintf("%s overlaps accept[%d]: %s", r, j, other), "keep the larger range")
				break
			}
		}
	}
	switch {
	case c.Role == fare.RoleServer && len(c.Loopbacks) == 0:
		p.add("loopbacks", "is missing", "write the address of each GPU, such as 10.255.0.1/32")
	case c.Role == fare.RoleLeaf && len(c.Loopbacks) > 0:
		p.add("loopbacks", "a leaf has no GPU", "remove the key, or use role: server")
	}
	families := map[bool]int{}
	for i, l := range c.Loopbacks {
		if p.loopback(c, i, l); slices.Contains(c.Loopbacks[:i], l) {
			continue
		}
		if families[l.Addr().Is4()]++; l.IsValid() && families[l.Addr().Is4()] == MaxLoopbacksPerFamily+1 {
			p.add(item("loopbacks", i), fmt.Sprintf("is number %d of its family", MaxLoopbacksPerFamily+1),
				fmt.Sprintf("use at most %d loopbacks of a family", MaxLoopbacksPerFamily))
		}
	}
}

func (p *problems) loopback(c *Config, i int, l netip.Prefix) {
	path, a := item("loopbacks", i), l.Addr()
	if !l.IsValid() {
		return
	}
	if why := unfit(a); why != "" {
		p.add(path, a.String()+" "+why, remedy(a, "use the GPU's own unicast address"))
		return
	}
	if !l.IsSingleIP() {
		p.add(path, l.String()+" is not one address", fmt.Sprintf("write %s/%d", a, a.BitLen()))
		return
	}
	for _, r := range local {
		if r.Contains(a) {
			p.add(path, fmt.Sprintf("%s is in %s, which has a different meaning on every machine", a, r), "use an address that the fabric routes")
			return
		}
	}
	if j := slices.Index(c.Loopbacks[:i], l); j >= 0 {
		p.add(path, fmt.Sprintf("%s is loopbacks[%d] too", l, j), "give each GPU a separate address")
		return
	}
	if p.partial("accept") {
		return
	}
	for _, r := range c.Accept {
		if !r.IsValid() || r.Masked().Contains(a) {
			return
		}
	}
	if len(c.Accept) > 0 {
		p.add(path, a.String()+" is in no range of accept, so other servers would drop it", "add its range to accept")
	}
}

func (p *problems) timers(c *Config) {
	whole := func(path string, d time.Duration) {
		if d%time.Second != 0 {
			p.add(path, d.String()+" is not a whole number of seconds", "use "+d.Truncate(time.Second).String()+" or "+
				(d.Truncate(time.Second)+time.Second).String())
		}
	}
	whole("bgp.hold_time", c.BGP.HoldTime)
	whole("bgp.keepalive_interval", c.BGP.KeepaliveInterval)
	whole("bgp.restart_time", c.BGP.RestartTime)
	if k, h := c.BGP.KeepaliveInterval, c.BGP.HoldTime; h >= 3*time.Second && k > h/3 {
		p.add("bgp.keepalive_interval", fmt.Sprintf("%s is more than a third of hold_time (%s)", k, h),
			"use at most "+(h/3).Truncate(time.Second).String())
	}
	p.bfd(&c.BFD, c.BGP.HoldTime)
}

// minBFD is the least interval of BFD: below it, delays of the process's scheduling look like silence.
const minBFD = 10 * time.Millisecond

// bfd checks the timers of BFD. An interval of 0 disables it.
func (p *problems) bfd(b *BFD, holdTime time.Duration) {
	switch {
	case b.Interval > 0 && b.Interval < minBFD:
		p.add("bfd.interval", b.Interval.String()+" is below "+minBFD.String(), "use more, or 0s to disable BFD")
	case b.Interval%time.Millisecond != 0:
		p.add("bfd.interval", b.Interval.String()+" is not a whole number of milliseconds", "use "+b.Interval.Truncate(time.Millisecond).String())
	}
	if silence := time.Duration(b.Multiplier) * b.Interval; silence >= holdTime && holdTime >= 3*time.Second && b.Multiplier <= 255 { // values out of range have separate errors
		p.add("bfd", fmt.Sprintf("would detect silence after %s, but bgp.hold_time already does after %s", silence, holdTime),
			"use a shorter interval or a smaller multiplier")
	}
	if b.Auth != nil && b.Auth.Type == BFDNoAuth {
		p.add("bfd.auth.type", "none is for single sessions (planes[].sub_ports[].sessions[].bfd_auth)", "remove bfd.auth")
		return
	}
	p.bfdAuth(b.Auth, "bfd.auth")
}

// bfdAuth checks the authentication of BFD packets, which may be nil.
func (p *problems) bfdAuth(a *BFDAuth, path string) {
	if a == nil || p.broken[path+".type"] {
		return
	}
	switch {
	case a.Type == BFDNoAuth && len(a.Keys) > 0:
		p.add(path+".keys", "has keys, but the type is none", "remove them, or use another type")
	case a.Type != BFDNoAuth && len(a.Keys) == 0:
		p.add(path+".keys", "has no key", "write a list of 1 to 8 keys, such as [{id: 1, key_file: credential:bfd}]")
	}
	for i, k := range a.Keys {
		if j := slices.IndexFunc(a.Keys[:i], func(o BFDKey) bool { return o.ID == k.ID }); j >= 0 && !p.partial(item(path+".keys", i)) && !p.partial(item(path+".keys", j)) {
			p.add(item(path+".keys", i)+".id", fmt.Sprintf("%d is the ID of keys[%d] too", k.ID, j), "give each key a separate ID")
		}
	}
}

// damping checks the order of the times of damping.
func (p *problems) damping(d *Damping) {
	if d.Longest < d.Hold {
		p.add("links.damping.longest", fmt.Sprintf("%s is below hold (%s)", d.Longest, d.Hold), "use at least "+d.Hold.String())
	}
	if d.Quiet <= d.Longest {
		p.add("links.damping.quiet", fmt.Sprintf("%s is not above longest (%s)", d.Quiet, d.Longest), "use more, such as "+(3*d.Longest).String())
	}
}

func (p *problems) pathBandwidth(c *Config) {
	b := c.PathBandwidth
	if b.FAREType == 0 && b.FARESubType == 0 {
		p.add("path_bandwidth.fare_sub_type", "type 0x00 and sub-type 0x00 are not a code point", "use another code point, such as 0x8e and 0x04")
	} else if err := fare.CheckCodePoint(b.FAREType, b.FARESubType); err != nil {
		key := "path_bandwidth.fare_sub_type"
		if b.FAREType&0x40 != 0 {
			key = "path_bandwidth.fare_type"
		}
		wrong, remedy, _ := strings.Cut(err.Error(), ": ")
		p.add(key, wrong, remedy)
	}
	if b.Scale != 1 && b.Scale != 1000 && b.Scale != fare.MaxScale {
		p.add("path_bandwidth.scale", fmt.Sprintf("%d is not a scale", b.Scale), "use 1, 1000 or 1000000, the same at all nodes")
	}
	p.bounds("path_bandwidth", b.Minimum, b.Maximum)
	for i, plane := range c.Planes {
		if plane.Minimum != b.Minimum || plane.Maximum != b.Maximum {
			p.bounds(item("planes", i), plane.Minimum, plane.Maximum)
		}
	}
}

func (p *problems) bounds(path string, least, most fare.Bandwidth) {
	if most != 0 && least > most {
		p.add(path+".minimum", fmt.Sprintf("%s is above the maximum of %s", least, most), "swap them or remove one")
	}
}

func (p *problems) weights(c *Config) {
	w := c.Weights
	subPorts, planes := c.largestSource()
	if c.Role == fare.RoleServer {
		need, what := subPorts, "sub-ports, but per-flow mode needs a slot on each"
		if w.Mode == wecmp.PerPacket {
			need, what = planes, "planes, but per-packet mode needs a slot on each"
		}
		if w.Slots != 0 && w.Slots < need {
			p.add("weights.slots", fmt.Sprintf("%d is fewer than the %d %s", w.Slots, need, what),
				fmt.Sprintf("use %d to %d, or 0 for exactly %d", need, MaxSlots, need))
		}
	}
	if c.Forwards() && w.MaxWeightSum != 0 && int64(w.MaxWeightSum) < int64(subPorts) {
		p.add("weights.max_weight_sum", fmt.Sprintf("%d is less than the number of sub-ports, %d, which need at least 1 each", w.MaxWeightSum, subPorts),
			fmt.Sprintf("use at least %d, or 0 for no limit", subPorts))
	}
	p.hash(w.Hash, subPorts)
}
