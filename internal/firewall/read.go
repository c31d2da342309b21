package firewall

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// generationHeader is the size of struct nfgenmsg.
const generationHeader = 4

// setFlags of nf_tables.h that are not in package unix.
const (
	setInterval = 0x4
	setTimeout  = 0x10
	setEval     = 0x20
)

// attributes are the attributes of one level by type, without the flags of nesting and byte order. The last one of a
// type wins.
type attributes map[uint16][]byte

// list calls f with each attribute of one level, in order.
func list(b []byte, f func(kind uint16, value []byte)) {
	for len(b) >= unix.SizeofNlAttr {
		size := int(binary.NativeEndian.Uint16(b))
		if size < unix.SizeofNlAttr || size > len(b) {
			return
		}
		f(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[unix.SizeofNlAttr:size])
		b = b[min(len(b), (size+unix.NLA_ALIGNTO-1)&^(unix.NLA_ALIGNTO-1)):]
	}
}

func parse(b []byte) attributes {
	out := attributes{}
	list(b, func(kind uint16, value []byte) { out[kind] = value })
	return out
}

// text returns a string attribute, "" if it is absent.
func (a attributes) text(kind uint16) string { return string(bytes.TrimRight(a[kind], "\x00")) }

// number returns an attribute of 32 bits in network byte order, 0 if it is absent.
func (a attributes) number(kind uint16) uint32 {
	if v := a[kind]; len(v) >= 4 {
		return binary.BigEndian.Uint32(v)
	}
	return 0
}

// value returns the bytes of a nested NFTA_DATA_VALUE.
func (a attributes) value(kind uint16) []byte { return parse(a[kind])[unix.NFTA_DATA_VALUE] }

// query sends a request of nftables about a family, AF_UNSPEC for all, and calls f with the family and the attributes
// of each answer.
func query(kind, answer uint16, family uint8, body []byte, f func(family uint8, a attributes)) error {
	r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|int(kind), unix.NLM_F_DUMP)
	r.AddRawData(append([]byte{family, unix.NFNETLINK_V0, 0, 0}, body...))
	return r.ExecuteIter(unix.NETLINK_NETFILTER, unix.NFNL_SUBSYS_NFTABLES<<8|answer, func(b []byte) bool {
		if len(b) >= generationHeader {
			f(b[0], parse(b[generationHeader:]))
		}
		return true
	})
}

// Generation returns the number of the present rules, which changes with each change of them. The error wraps
// errors.ErrUnsupported if the kernel has no nftables. The caller runs inside the network namespace, with
// CAP_NET_ADMIN.
func Generation() (n uint32, err error) {
	n, err = generation()
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
		return 0, fmt.Errorf("nftables: %w: %w", errors.ErrUnsupported, err)
	}
	if err != nil {
		return 0, fmt.Errorf("nftables: read the generation of the rules: %w", err)
	}
	return n, nil
}

// generation is query for Generation, which an idle process calls each second: its socket is unknown to the runtime,
// whose threads would wake for each change of the socket's state. The kernel answers before the request returns.
func generation() (uint32, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN, 0)
	r.AddRawData([]byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0})
	if err := unix.Sendto(fd, r.Serialize(), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, err
	}
	var b [256]byte
	n, _, err := unix.Recvfrom(fd, b[:], unix.MSG_DONTWAIT)
	if err != nil {
		return 0, err
	}
	switch body := b[min(n, unix.NLMSG_HDRLEN):n]; {
	case len(body) >= 4 && binary.NativeEndian.Uint16(b[4:]) == unix.NLMSG_ERROR:
		return 0, unix.Errno(-int32(binary.NativeEndian.Uint32(body)))
	case len(body) >= generationHeader && binary.NativeEndian.Uint16(b[4:]) == unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN:
		return parse(body[generationHeader:]).number(unix.NFTA_GEN_ID), nil
	}
	return 0, errors.New("unexpected answer of the kernel")
}

// Read returns the rules of the network namespace that the calling thread is in. It needs CAP_NET_ADMIN.
func Read() (*Ruleset, error) {
	rs := &Ruleset{chains: map[chainName]*chain{}, sets: map[chainName]*set{}}
	if err := rs.readChains(); err != nil {
		return nil, fmt.Errorf("nftables: read the chains: %w", err)
	}
	if len(rs.base) == 0 {
		return rs, nil
	}
	if err := rs.readRules(); err != nil {
		return nil, fmt.Errorf("nftables: read the rules: %w", err)
	}
	if err := rs.readSets(); err != nil {
		return nil, fmt.Errorf("nftables: %w", err)
	}
	return rs, nil
}

func (rs *Ruleset) readChains() error {
	return query(unix.NFT_MSG_GETCHAIN, unix.NFT_MSG_NEWCHAIN, unix.AF_UNSPEC, nil, func(family uint8, a attributes) {
		name := chainName{family, a.text(unix.NFTA_CHAIN_TABLE), a.text(unix.NFTA_CHAIN_NAME)}
		c := &chain{name: name, hook: noHook}
		if hook, ok := a[unix.NFTA_CHAIN_HOOK]; ok {
			h := parse(hook)
			c.hook, c.priority = int(h.number(unix.NFTA_HOOK_HOOKNUM)), int32(h.number(unix.NFTA_HOOK_PRIORITY))
			c.drops = a.number(unix.NFTA_CHAIN_POLICY) == nfDrop && len(a[unix.NFTA_CHAIN_POLICY]) > 0
			rs.base = append(rs.base, c)
		}
		rs.chains[name] = c
	})
}

// readRules reads all rules; the kernel sends those of one chain in their order.
func (rs *Ruleset) readRules() error {
	return query(unix.NFT_MSG_GETRULE, unix.NFT_MSG_NEWRULE, unix.AF_UNSPEC, nil, func(family uint8, a attributes) {
		c := rs.chains[chainName{family, a.text(unix.NFTA_RULE_TABLE), a.text(unix.NFTA_RULE_CHAIN)}]
		if c == nil {
			return // made since the chains were read; the generation has changed too
		}
		r := rule{}
		if h := a[unix.NFTA_RULE_HANDLE]; len(h) == 8 {
			r.handle = binary.BigEndian.Uint64(h)
		}
		list(a[unix.NFTA_RULE_EXPRESSIONS], func(_ uint16, b []byte) {
			e := parse(b)
			x := expression{kind: e.text(unix.NFTA_EXPR_NAME), data: parse(e[unix.NFTA_EXPR_DATA])}
			switch x.kind {
			case "notrack":
				rs.untracks = true
			case "nat", "redir", "masq", "tproxy", "target":
				rs.translates = true
				rs.untracks = rs.untracks || slices.Contains([]string{"CT", "NOTRACK"}, x.data.text(unix.NFTA_TARGET_NAME))
			case "lookup":
				name := chainName{family, c.name.table, x.data.text(unix.NFTA_LOOKUP_SET)}
				if rs.sets[name] == nil {
					rs.sets[name] = &set{}
				}
				x.set = rs.sets[name]
			}
			r.expressions = append(r.expressions, x)
		})
		c.rules = append(c.rules, r)
	})
}

// readSets reads the flags of the sets that rules name, then their elements.
func (rs *Ruleset) readSets() error {
	err := query(unix.NFT_MSG_GETSET, unix.NFT_MSG_NEWSET, unix.AF_UNSPEC, nil, func(family uint8, a attributes) {
		if s := rs.sets[chainName{family, a.text(unix.NFTA_SET_TABLE), a.text(unix.NFTA_SET_NAME)}]; s != nil {
			s.found, s.flags = true, a.number(unix.NFTA_SET_FLAGS)
		}
	})
	if err != nil {
		return fmt.Errorf("read the sets: %w", err)
	}
	for name, s := range rs.sets {
		if s.found = s.found && s.flags&(setTimeout|setEval) == 0; !s.found { // packets and time change the elements
			continue
		}
		if err := s.read(name); err != nil {
			return fmt.Errorf("read the set %s of table %s %s: %w", name.chain, familyName[name.family], name.table, err)
		}
	}
	return nil
}

// read reads the elements of a set.
func (s *set) read(name chainName) error {
	body := append(attribute(unix.NFTA_SET_ELEM_LIST_TABLE, name.table), attribute(unix.NFTA_SET_ELEM_LIST_SET, name.chain)...)
	return query(unix.NFT_MSG_GETSETELEM, unix.NFT_MSG_NEWSETELEM, name.family, body, func(_ uint8, a attributes) {
		list(a[unix.NFTA_SET_ELEM_LIST_ELEMENTS], func(_ uint16, b []byte) {
			a := parse(b)
			e := element{key: a.value(unix.NFTA_SET_ELEM_KEY), end: a.value(setElementKeyEnd), flags: a.number(unix.NFTA_SET_ELEM_FLAGS)}
			if data, ok := a[unix.NFTA_SET_ELEM_DATA]; ok {
				e.verdict = parse(data)[unix.NFTA_DATA_VERDICT]
			}
			s.elements = append(s.elements, e)
		})
	})
}

// setElementKeyEnd is NFTA_SET_ELEM_KEY_END, which package unix lacks.
const setElementKeyEnd = 0xa

// attribute returns a string attribute.
func attribute(kind uint16, text string) []byte {
	size := unix.SizeofNlAttr + len(text) + 1
	b := make([]byte, (size+unix.NLA_ALIGNTO-1)&^(unix.NLA_ALIGNTO-1))
	binary.NativeEndian.PutUint16(b, uint16(size))
	binary.NativeEndian.PutUint16(b[2:], kind)
	copy(b[unix.SizeofNlAttr:], text)
	return b
}
