package config

import (
	"fmt"
	"net/netip"
	"reflect"
	"time"

	"github.com/fared/fared/daemon/config/internal/model"
	"github.com/fared/fared/fare"
)

// resolve sets every value that the file does not contain to its default. No other function does this. It keeps values
// that are not zero: the decoder leaves absent or undecodable values at zero.
func resolve(c *Config, written func(path string) bool) {
	defaults(reflect.ValueOf(c).Elem(), "", written)
	derive(c, written)
}

// defaults applies the default tags.
func defaults(v reflect.Value, path string, written func(string) bool) {
	for _, f := range model.Fields(v.Type()) {
		fv, where := v.Field(f.Index), join(path, f.Key)
		switch {
		case f.Object != nil && f.List:
			for i := range fv.Len() {
				defaults(fv.Index(i), item(where, i), written)
			}
		case f.Object != nil && f.Optional:
			if !fv.IsNil() {
				defaults(fv.Elem(), where, written)
			}
		case f.Object != nil:
			defaults(fv, where, written)
		case f.Default != "" && fv.IsZero() && !written(where):
			setDefault(&f, fv)
		}
	}
}

func setDefault(f *model.Field, v reflect.Value) {
	texts := f.Defaults()
	if f.List {
		v.Set(reflect.MakeSlice(v.Type(), len(texts), len(texts)))
	}
	for i, text := range texts {
		target := v
		if f.List {
			target = v.Index(i)
		}
		if p := f.Scalar.Parse(text, target); p != nil {
			panic(fmt.Sprintf("config: default of %s: %s", f.Key, p.Wrong)) // a mistake in types.go, found by the first test
		}
	}
}

// derive applies the defaults that depend on other values: the derived tags.
func derive(c *Config, written func(string) bool) {
	if !c.RouterID.IsValid() && !written("router_id") {
		for _, l := range c.Loopbacks {
			if l.Addr().Is4() {
				c.RouterID = l.Addr()
				break
			}
		}
	}
	if c.BGP.KeepaliveInterval == 0 && !written("bgp.keepalive_interval") {
		c.BGP.KeepaliveInterval = max(c.BGP.HoldTime/3/time.Second*time.Second, time.Second) // RFC 4271, Section 4.4
	}
	if c.Dataplane.Address == "" && !written("dataplane.address") {
		c.Dataplane.Address = "unix:/run/fared-dataplane/dataplane.sock"
		if c.Role == fare.RoleLeaf {
			c.Dataplane.Address = MemoryDataplane
		}
	}
	if c.API.ReadOnlySocket == "" && !written("api.read_only_socket") {
		c.API.ReadOnlySocket = ReadOnlySocketOf(c.API.Socket)
	}
	if c.SlotTable.File == "" && !written("slots.file") {
		c.SlotTable.File = SlotTableOf(c.API.Socket)
		if c.Role == fare.RoleLeaf {
			c.SlotTable.File = NoSlotTable
		}
	}
	if c.SlotTable.File == FormerSlotTable {
		c.SlotTable.File = DefaultSlotTable // with a link at the former path
	}
	if c.Drains.File == "" && !written("drains.file") {
		c.Drains.File = DrainsOf(c.API.Socket)
	}
	for i := range c.Planes {
		p, path := &c.Planes[i], item("planes", i)
		if p.Minimum == 0 && !written(path+".minimum") {
			p.Minimum = c.PathBandwidth.Minimum
		}
		if p.Maximum == 0 && !written(path+".maximum") {
			p.Maximum = c.PathBandwidth.Maximum
		}
		for j := range p.SubPorts {
			sp, path := &p.SubPorts[j], item(path+".sub_ports", j)
			for k := range sp.Sessions {
				deriveSession(c.Role, p.Name, sp, k, item(path+".sessions", k), written)
			}
		}
	}
}

func deriveSession(role fare.Role, plane string, sp *SubPort, index int, path string, written func(string) bool) {
	s := &sp.Sessions[index]
	if s.Name == "" && !written(path+".name") {
		s.Name = sessionName(plane, sp.Device, index)
	}
	// A link-local address is meaningless without the link: RFC 4007, Section 6.
	s.Peer, s.Local = onLink(s.Peer, sp.Device), onLink(s.Local, sp.Device)
	// One of two fareds has to listen: as on numbered cables that topo writes, the lower end connects.
	if !s.Passive && !written(path+".passive") {
		s.Passive = s.Unnumbered && role == fare.RoleLeaf && !sp.Uplink && s.PasswordFile == "" && s.TCPAO == nil
	}
	linkLocal := s.Unnumbered || s.Peer.Is6() && s.Peer.IsLinkLocalUnicast()
	if s.Families == nil && !written(path+".families") {
		switch {
		case linkLocal:
			s.Families = []Family{IPv4, IPv6}
		case s.Peer.Is6():
			s.Families = []Family{IPv6}
		default:
			s.Families = []Family{IPv4}
		}
	}
	if !s.ExtendedNextHop && !written(path+".extended_next_hop") {
		s.ExtendedNextHop = (s.Unnumbered || s.Peer.Is6()) && s.carries(IPv4)
	}
}

// sessionName returns the default name of a sub-port's session.
func sessionName(plane, device string, index int) string {
	if index > 0 {
		return fmt.Sprintf("%s/%s#%d", plane, device, index+1)
	}
	return plane + "/" + device
}

// onLink adds the device as zone to an IPv6 link-local address without a zone.
func onLink(a netip.Addr, device string) netip.Addr {
	if a.Is6() && a.IsLinkLocalUnicast() && a.Zone() == "" {
		return a.WithZone(device)
	}
	return a
}

func (s *Session) carries(f Family) bool {
	for _, have := range s.Families {
		if have == f {
			return true
		}
	}
	return false
}

// clone returns a deep copy of a configuration.
func clone(c *Config) *Config {
	out := reflect.New(reflect.TypeFor[Config]())
	copyDeep(out.Elem(), reflect.ValueOf(c).Elem())
	return out.Interface().(*Config)
}

func copyDeep(dst, src reflect.Value) {
	dst.Set(src)
	switch {
	case src.Kind() == reflect.Slice && !src.IsNil():
		dst.Set(reflect.MakeSlice(src.Type(), src.Len(), src.Len()))
		for i := range src.Len() {
			copyDeep(dst.Index(i), src.Index(i))
		}
	case src.Kind() == reflect.Pointer && !src.IsNil():
		dst.Set(reflect.New(src.Type().Elem()))
		copyDeep(dst.Elem(), src.Elem())
	case src.Kind() == reflect.Struct && src.Type().PkgPath() == reflect.TypeFor[Config]().PkgPath():
		for i := range src.NumField() {
			copyDeep(dst.Field(i), src.Field(i))
		}
	}
}
