package fare

import "fmt"

// assignedSubTypes lists the code points of extended communities that are assigned
// to another community, by type and sub-type. A route of the fabric may carry such
// a community, and it would be decoded as a bandwidth. The list is gathered from
// RFC 4360, 4384, 4577, 5668, 6074, 6514, 7524, 7543, 7796, 7900, 7902, 8955,
// 9012, 9015, 9081 and 10005 and from public decoders. The authority is the IANA
// registry "Border Gateway Protocol (BGP) Extended Communities", which may hold
// more.
var assignedSubTypes = map[byte]map[byte]string{
	0x00: {0x02: "Route Target", 0x03: "Route Origin", 0x04: "Link Bandwidth", 0x05: "OSPF Domain Identifier",
		0x08: "BGP Data Collection", 0x09: "Source AS", 0x0a: "L2VPN Identifier", 0x10: "Cisco VPN-Distinguisher", 0x13: "Route-Target Record",
		0x80: "Virtual-Network Identifier"},
	0x01: {0x02: "Route Target", 0x03: "Route Origin", 0x05: "OSPF Domain Identifier", 0x07: "OSPF Route ID", 0x0a: "L2VPN Identifier",
		0x0b: "VRF Route Import", 0x0c: "Flow Specification Redirect", 0x10: "Cisco VPN-Distinguisher",
		0x12: "Inter-Area P2MP Segmented Next-Hop", 0x13: "Route-Target Record", 0x14: "VRF-Recursive-Next-Hop", 0x20: "MVPN SA RP-address"},
	0x02: {0x02: "Route Target", 0x03: "Route Origin", 0x04: "Generic", 0x05: "OSPF Domain Identifier", 0x08: "BGP Data Collection",
		0x09: "Source AS", 0x10: "Cisco VPN-Distinguisher", 0x13: "Route-Target Record"},
	0x03: {0x01: "Cost", 0x03: "CP-ORF", 0x04: "Extranet Source", 0x05: "Extranet Separation", 0x06: "OSPF Route Type",
		0x07: "Additional PMSI Tunnel Attribute Flags", 0x08: "Context-Specific Label Space ID", 0x0b: "Color", 0x0c: "Encapsulation",
		0x0d: "Default Gateway", 0x0e: "Point-to-Point-to-Multipoint Label", 0x13: "Route-Target Record", 0x14: "Consistent Hash Sort Order",
		0xaa: "LoadBalance"},
	0x80: {0x00: "OSPF Route Type", 0x01: "OSPF Router ID", 0x05: "OSPF Domain Identifier", 0x06: "Flow Specification Traffic Rate",
		0x07: "Flow Specification Traffic Action", 0x08: "Flow Specification Redirect", 0x09: "Flow Specification Traffic Marking",
		0x0a: "Layer 2 Info", 0x0b: "E-Tree Info", 0x0c: "Flow Specification Traffic Rate", 0x0d: "Flow Specification for SFC Classifiers"},
	0x81: {0x08: "Flow Specification Redirect"},
	0x82: {0x08: "Flow Specification Redirect"},
}

// assignedTypes lists the types whose sub-types all belong to another community.
var assignedTypes = map[byte]string{
	0x04: "QoS Marking", 0x05: "CoS Capability", 0x06: "EVPN", 0x07: "Flow Specification", 0x08: "Flow Specification Redirect to IP",
	0x09: "Flow Specification Redirect to Indirection-ID", 0x0a: "Transport Class", 0x0b: "Service Function Chaining", 0x0c: "SRv6 Mobile User Plane",
}

// CheckCodePoint returns an error if the FARE community cannot use the code point:
// either the type is not transitive, so that the community would be dropped at the
// first peer (RFC 4360, Section 2), or the code point is assigned to another
// community.
func CheckCodePoint(kind, subType byte) error {
	if kind&0x40 != 0 {
		return fmt.Errorf("type %#02x is not transitive, so the community ends at the first peer (RFC 4360): clear bit 0x40, as in %#02x", kind, kind&^0x40)
	}
	name, ok := assignedTypes[kind]
	if !ok {
		name, ok = assignedSubTypes[kind][subType]
	}
	if ok {
		return fmt.Errorf("type %#02x and sub-type %#02x are those of %s: use another code point, such as %#02x and %#02x",
			kind, subType, name, DefaultFAREType, DefaultFARESubType)
	}
	return nil
}
