package returning

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/fared/fared/internal/plainfile"
)

// device is a sub-port in the file.
type device struct {
	Name      string    `json:"device"`
	Index     int       `json:"index"` // 0 while it is absent
	Addresses []address `json:"addresses"`
}

// address is the part of an address that an administrator sets.
type address struct {
	Prefix    netip.Prefix `json:"prefix"`
	Peer      netip.Prefix `json:"peer,omitzero"`
	Broadcast netip.Addr   `json:"broadcast,omitzero"`
	Scope     int          `json:"scope,omitempty"`
	Flags     int          `json:"flags"`
}

// load reads the sub-ports of an earlier process.
func (k *Keeper) load() {
	if k.path == "" {
		return
	}
	file, err := plainfile.Open(k.path, os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var all []device
	if err == nil {
		err = json.NewDecoder(file).Decode(&all)
		file.Close()
	}
	if err != nil {
		k.log.Warn("cannot read the addresses that sub-ports had", "file", k.path, "error", err)
		return
	}
	for _, d := range all {
		s := &subPort{name: d.Name, index: d.Index, up: d.Index != 0, unseen: true, missing: map[string]time.Time{}}
		for _, a := range d.Addresses {
			s.known = append(s.known, a.parsed())
		}
		k.subPorts[d.Name] = s
	}
}

// save writes the file if it differs. The caller holds mu.
func (k *Keeper) save() error {
	if k.path == "" {
		return nil
	}
	all := []device{}
	for _, s := range k.subPorts {
		d := device{Name: s.name, Index: s.index}
		if s.returned {
			d.Index = 0 // a process that starts now finds it returned, too
		}
		for i := range s.known {
			d.Addresses = append(d.Addresses, written(&s.known[i]))
		}
		if len(d.Addresses) > 0 {
			all = append(all, d)
		}
	}
	slices.SortFunc(all, func(a, b device) int { return strings.Compare(a.Name, b.Name) })
	text, err := json.Marshal(all)
	if err != nil || bytes.Equal(text, k.saved) {
		return err
	}
	next := k.path + ".new"
	file, err := plainfile.Open(next, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(text)
	if err = errors.Join(err, file.Close()); err == nil {
		err = os.Rename(next, k.path)
	}
	if err == nil {
		k.saved = text
	}
	return err
}

func written(a *netlink.Addr) (out address) {
	out = address{Prefix: prefix(a.IPNet), Scope: a.Scope, Flags: a.Flags}
	if a.Peer != nil {
		out.Peer = prefix(a.Peer)
	}
	out.Broadcast, _ = netip.AddrFromSlice(a.Broadcast)
	return out
}

func (a *address) parsed() netlink.Addr {
	out := netlink.Addr{IPNet: ipNet(a.Prefix), Scope: a.Scope, Flags: a.Flags}
	if a.Peer.IsValid() {
		out.Peer = ipNet(a.Peer)
	}
	if a.Broadcast.IsValid() {
		out.Broadcast = a.Broadcast.AsSlice()
	}
	return out
}

func prefix(n *net.IPNet) netip.Prefix {
	addr, _ := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(addr.Unmap(), bits)
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
