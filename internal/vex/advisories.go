// Command vex writes which public advisories concern fared, as an OpenVEX document (OpenVEX specification 0.2.0) for scanners, or as the table of
// docs/security.md.
package main

// advisory is a public advisory for a library that is linked into fared, which no version of the library's series repairs.
type advisory struct {
	id      string // of GitHub's advisory database
	cve     string // empty: none is assigned
	fault   string
	status  justification
	impact  string // why it has no effect here
	shownBy string // a test as PACKAGE.TEST, with the path of the package
}

// justification is one of OpenVEX's reasons why a product is not affected.
type justification string

const (
	notReached    justification = "vulnerable_code_not_in_execute_path"
	notControlled justification = "vulnerable_code_cannot_be_controlled_by_adversary"
)

const (
	byGuard  = "daemon/internal/guard.TestAdvisories"
	bySource = "internal/vex.TestFeaturesAreNotUsed"
	noUpdate = "The guard parses every UPDATE itself, and the library receives none. "
	noCall   = "fared never enables it. "
)

// library is the module that the advisories concern.
const library = "github.com/osrg/gobgp/v3"

// advisories has the advisories of 2026 for GoBGP. Those of 2025 are repaired in the version in use.
var advisories = []advisory{
	{"GHSA-4p9m-8gc4-rw2h", "CVE-2026-30405", "a NEXT_HOP with another length than 4 ends the process", notControlled,
		noUpdate + "A NEXT_HOP of another length withdraws the route (RFC 7606, Section 7.3).", byGuard},
	{"GHSA-7235-89m6-f4px", "CVE-2026-41642", "an unknown attribute marked well-known ends the process", notControlled,
		noUpdate + "Such an attribute ends the session (RFC 4271, Section 6.3).", byGuard},
	{"GHSA-8rxh-r2p6-7f2q", "CVE-2026-41643", "an AS4_PATH before the AS_PATH ends the process", notControlled,
		noUpdate + "Their order has no effect.", byGuard},
	{"GHSA-p3w2-64xm-833j", "CVE-2026-42285", "inconsistent lengths of attributes end the process", notControlled,
		noUpdate + "An attribute beyond the attributes' length withdraws the routes (RFC 7606, Section 4).", byGuard},
	{"GHSA-frrj-87jh-2772", "", "an AS_PATH of 0 octets from a peer of the confederation ends the process", notControlled,
		noUpdate + "fared has no confederations, and such a path withdraws the route.", byGuard},
	{"GHSA-vm3g-8xwv-mxfp", "CVE-2026-7734", "a Prefix-SID attribute for SRv6 ends the process", notControlled,
		noUpdate + "The attribute is dropped.", byGuard},
	{"GHSA-wmvj-f67g-qg4g", "CVE-2026-37461", "a short IPv6 extended community ends the process", notControlled,
		noUpdate + "The attribute is dropped.", byGuard},
	{"GHSA-pw7p-7fqv-hpj8", "CVE-2026-37462", "withdrawn routes beyond their length are read from other fields", notControlled,
		noUpdate + "A prefix beyond the length of its field ends the session.", byGuard},
	{"GHSA-gjrg-jjr3-56cm", "", "a short capability takes its value from the next one", notControlled,
		"The guard composes the OPEN that the library receives. A 4-octet AS of another length than 4 ends the session.", byGuard},
	{"GHSA-w88c-9vg8-cmq8", "CVE-2026-7737", "messages of a BMP station are read beyond their end", notReached,
		noCall + "The library's BMP client only sends.", bySource},
	{"GHSA-hj4w-qr9j-c4cf", "CVE-2026-7736", "an MRT file is read beyond its end", notReached,
		noCall + "fared reads and writes no MRT files.", bySource},
}
