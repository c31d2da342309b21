// Command vex writes which public advisories concern fared, as an OpenVEX document (OpenVEX specification 0.2.0) for
// scanners, or as the table of docs/security.md.
package main

// advisory is a public advisory for a library that is linked into fared, which no version of the library's series
// repairs.
type advisory struct {
	id      string // of GitHub's advisory database
	cve     string // empty: none is assigned
	fault   string // the effect in words, not its trigger
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
	byGuard  = "daemon/internal/guard.TestOnlyComposedMessagesReachTheSpeaker"
	bySource = "internal/tools/vex.TestFeaturesAreNotUsed"
	noUpdate = "The guard parses every UPDATE itself, and the library receives none. "
	noCall   = "fared never enables it. "
)

// library is the module that the advisories concern.
const library = "github.com/osrg/gobgp/v3"

// advisories has the advisories of 2026 for GoBGP. Those of 2025 are repaired in the version in use.
var advisories = []advisory{
	{"GHSA-4p9m-8gc4-rw2h", "CVE-2026-30405", "a malformed next hop ends the process", notControlled,
		noUpdate + "A malformed NEXT_HOP withdraws the route (RFC 7606, Section 7.3).", byGuard},
	{"GHSA-7235-89m6-f4px", "CVE-2026-41642", "an unknown attribute ends the process", notControlled,
		noUpdate + "Unknown attributes are dropped, or end the session (RFC 4271, Section 6.3).", byGuard},
	{"GHSA-8rxh-r2p6-7f2q", "CVE-2026-41643", "an AS4_PATH ends the process", notControlled,
		noUpdate + "AS4_PATH follows RFC 6793, Section 4.2.3.", byGuard},
	{"GHSA-p3w2-64xm-833j", "CVE-2026-42285", "malformed attributes end the process", notControlled,
		noUpdate + "Malformed attributes withdraw the routes (RFC 7606, Section 4).", byGuard},
	{"GHSA-frrj-87jh-2772", "", "a peer of the confederation ends the process", notControlled,
		noUpdate + "fared has no confederations.", byGuard},
	{"GHSA-vm3g-8xwv-mxfp", "CVE-2026-7734", "a Prefix-SID attribute ends the process", notControlled,
		noUpdate + "The attribute is dropped.", byGuard},
	{"GHSA-wmvj-f67g-qg4g", "CVE-2026-37461", "a malformed IPv6 extended community ends the process", notControlled,
		noUpdate + "The attribute is dropped.", byGuard},
	{"GHSA-pw7p-7fqv-hpj8", "CVE-2026-37462", "malformed withdrawn routes are accepted", notControlled,
		noUpdate + "A malformed prefix ends the session (RFC 7606, Section 5.3).", byGuard},
	{"GHSA-gjrg-jjr3-56cm", "", "a malformed capability is accepted", notControlled,
		"The guard composes the OPEN that the library receives. A malformed capability ends the session.", byGuard},
	{"GHSA-w88c-9vg8-cmq8", "CVE-2026-7737", "the parser of BMP messages ends the process", notReached,
		noCall + "The library's BMP client only sends.", bySource},
	{"GHSA-hj4w-qr9j-c4cf", "CVE-2026-7736", "the parser of MRT files ends the process", notReached,
		noCall + "fared reads and writes no MRT files.", bySource},
}
