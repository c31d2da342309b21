package systemd

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// older is a version before every release.
const older = "0.0.1"

// packages builds the packages of a version, "" for that of the file VERSION, for this machine's architecture, and
// returns their files by name. The environment may choose some of them.
func packages(t *testing.T, version string, environment ...string) map[string]string {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.Command("../scripts/packages.sh", dir)
	cmd.Env = append(append(os.Environ(), "VERSION="+version, "ARCHS="+runtime.GOARCH), environment...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, out)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for _, e := range entries {
		files[e.Name()] = filepath.Join(dir, e.Name())
	}
	return files
}

func digest(t *testing.T, file string) string {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).Output()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, stderr(err))
	}
	return strings.TrimSpace(string(out))
}

// current returns the version of the file VERSION.
func current(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../VERSION")
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(text))
}

// deb is the name of the package of a version.
func deb(version string) string { return fmt.Sprintf("fared_%s-1_%s.deb", version, runtime.GOARCH) }

// traces lists everything of fared in a machine.
const traces = `find / -xdev \( -path /proc -o -path /sys -o -path /tmp \) -prune -o -iname '*fared*' -print; getent passwd | grep fared; getent group | grep fared; ip nexthop show protocol 179; ip route show proto 179`

// every is the list of all ports of the machine.
var every = []int{0, 1, 2, 3, 4, 5, 6, 7}

// install installs a version that has been copied to the machine.
func (m *machine) install(version string) {
	m.run("dpkg --install --force-downgrade /tmp/" + deb(version))
}

// begin installs a version in a machine that has never had fared, behind four FRR leaves, checks the installation, and
// starts the units.
func (m *machine) begin(t *testing.T, version string) {
	t.Helper()
	m.install(version)
	if out := m.run("fared version"); !strings.Contains(out, version) {
		t.Errorf("fared version prints %q", out)
	}
	if out, _ := m.try("systemctl is-active fared fared-dataplane; systemctl is-enabled fared fared-dataplane"); out != "inactive\ninactive\ndisabled\ndisabled" {
		t.Errorf("after the installation the units are %q", out)
	}
	if out, err := m.try("systemd-analyze --man=no verify /usr/lib/systemd/system/fared*.service"); err != nil || out != "" {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	m.run("systemctl stop frr")
	m.leaves()
	// The site gives the devices their addresses, here those of the example; fared init finds the rest.
	m.netsetup("/usr/share/doc/fared/examples/server-8gpu.yaml")
	m.t.Logf("fared init:\n%s", m.run("fared init --as 4200000001 2>&1 && fared check && systemctl enable --now fared-dataplane fared"))
	m.forwards("start", patience(lossLimit*4), every...)
}

// TestPackage installs the deb in a machine that has never had fared, behind four FRR leaves, starts its units, and
// purges it: the kernel forwards over every port, and the purge leaves no file, user, group or kernel object.
func TestPackage(t *testing.T) {
	gate.Needed(t, "the package and its units work under systemd, and leave nothing")
	netnstest.Require(t, "docker", "go", "dpkg-deb")
	version := current(t)
	files := packages(t, "", "PACKAGES=fared fared-lab", "FORMATS=deb")
	for name, file := range files {
		if strings.HasSuffix(name, ".deb") {
			output(t, "dpkg-deb", "--field", file) // it is one that dpkg can read
		}
	}
	m := bare(t)
	if out, _ := m.try(traces); out != "" {
		t.Fatalf("the machine already has\n%s", out)
	}
	m.copy(files[deb(version)], "/tmp/"+deb(version))
	m.begin(t, version)
	// The removal must find the journal where the agent's flags place it.
	m.run(`echo 'FARED_DATAPLANE_FLAGS="--journal /run/fared-dataplane/site.journal"' >>/etc/default/fared-dataplane && rm /run/fared-dataplane/dataplane.journal && systemctl restart fared-dataplane`)
	m.eventually("test -s /run/fared-dataplane/site.journal && ip nexthop show protocol 179 | grep group")
	m.run("dpkg --remove fared")
	if out := m.run("ip nexthop show protocol 179; ip route show proto 179; ip -6 route show proto 179"); out != "" {
		t.Errorf("the removed package leaves in the kernel\n%s", out)
	}
	m.run("test -e /etc/fared/fared.yaml") // a removal keeps the configuration
	m.run("dpkg --purge fared")
	if out, _ := m.try(traces); out != "" {
		t.Errorf("the purged package leaves\n%s", out)
	}
}

// TestRelease builds all files of a release, twice with equal bytes, and checks their contents.
func TestRelease(t *testing.T) {
	gate.Slow(t, gate.Systemd, "two builds of all files of a release")
	netnstest.Require(t, "go", "cc", "dpkg-deb", "rpm")
	files := packages(t, "")
	contents(t, current(t), files)
	for name, file := range packages(t, "") {
		if digest(t, file) != digest(t, files[name]) {
			t.Errorf("two builds of %s differ", name)
		}
	}
}

// TestUpgrade upgrades the package of a server that forwards, and goes back to the previous version: every packet sent
// meanwhile arrives at a leaf, and the kernel forwards over every port. A drain lasts over both.
func TestUpgrade(t *testing.T) {
	gate.Slow(t, gate.Systemd, "two packages, three upgrades and a drain over kills")
	netnstest.Require(t, "docker", "go", "dpkg-deb")
	current := current(t)
	before, after := packages(t, older, "PACKAGES=fared", "FORMATS=deb"), packages(t, "", "PACKAGES=fared", "FORMATS=deb")
	m := bare(t)
	m.copy(before[deb(older)], "/tmp/"+deb(older))
	m.copy(after[deb(current)], "/tmp/"+deb(current))
	m.begin(t, older)
	for _, change := range []struct{ name, version string }{{"upgrade", current}, {"rollback", older}} {
		m.carries(change.name, func() {
			m.keeps(change.name, func() {
				m.install(change.version)
				m.eventually(fmt.Sprintf(`fared status -o json | grep -F '"version": "%s"'`, change.version))
				m.eventually(fmt.Sprintf("fared dataplane show | grep -wF %s", change.version))
				m.forwards(change.name, patience(lossLimit*4), every...)
				m.eventually("fared sessions -o json | grep -c '\"established\"' | grep -x 8")
			})
		})
	}

	// A drain lasts until its undrain: over an upgrade, killed processes, and a start of the daemon before or after its
	// agent.
	open := []int{0, 1, 4, 5, 6, 7}
	stays := func(what string) {
		t.Helper()
		m.eventually("fared sessions -o json | grep -c '\"drained\"' | grep -x 2")
		m.forwards(what, patience(lossLimit*4), open...)
		if out := m.run("fared status"); !strings.Contains(out, "plane p1: drained") || !strings.Contains(out, "by uid 0 (root) pid ") || !strings.Contains(out, ": new optics") {
			t.Errorf("after %s:\n%s", what, out)
		}
	}
	m.run("fared drain plane p1 --reason 'new optics' --wait")
	stays("drain")
	m.install(current)
	m.eventually(fmt.Sprintf(`fared status -o json | grep -F '"version": "%s"'`, current))
	stays("upgrade during a drain")
	for _, order := range []string{"fared fared-dataplane", "fared-dataplane fared"} {
		units := strings.Fields(order)
		m.run("systemctl kill --signal=KILL fared fared-dataplane; systemctl stop fared fared-dataplane; systemctl reset-failed; " +
			"systemctl start --no-block " + units[0] + "; sleep 1; systemctl start " + units[1])
		stays("start of " + order)
	}
	m.run("fared undrain plane p1 --wait")
	m.forwards("undrain", patience(returnLimit*4), every...)
}

// contents checks all files of the version.
func contents(t *testing.T, version string, files map[string]string) {
	sums, err := os.ReadFile(files["SHA256SUMS"])
	if err != nil {
		t.Fatal(err)
	}
	named := 0
	for line := range strings.Lines(string(sums)) {
		sum, name, ok := strings.Cut(strings.TrimSpace(line), "  ")
		if !ok || digest(t, files[name]) != sum {
			t.Errorf("SHA256SUMS has %q for another content", line)
		}
		named++
	}
	if named != len(files)-1 || named < 6 {
		t.Errorf("SHA256SUMS names %d of %d files", named, len(files)-1)
	}

	arch := map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[runtime.GOARCH]
	inRPM := strings.Fields(output(t, "rpm", "--query", "--list", "--package", files["fared-"+version+"-1."+arch+".rpm"]))
	inDeb := output(t, "dpkg-deb", "--contents", files["fared_"+version+"-1_"+runtime.GOARCH+".deb"])
	for _, name := range []string{"/usr/bin/fared", "/usr/lib/systemd/system/fared.service", "/usr/lib/systemd/system/fared-dataplane.service", "/usr/lib/sysusers.d/fared.conf",
		"/usr/lib/systemd/networkd.conf.d/10-fared.conf", "/usr/lib/systemd/network/10-fared.network", "/usr/lib/NetworkManager/conf.d/10-fared.conf", "/etc/default/fared", "/etc/default/fared-dataplane", "/usr/lib/systemd/system/fared-report.service", "/etc/default/fared-report",
		"/usr/share/man/man1/fared-drain.1.gz", "/usr/share/bash-completion/completions/fared", "/usr/share/doc/fared/examples/server-8gpu.yaml", "/etc/fared",
		"/usr/share/doc/fared/examples/fared.rules.yml", "/usr/share/doc/fared/examples/fared.dashboard.json", "/usr/share/doc/fared/operations/alerts.md", "/usr/share/doc/fared/configuration.md",
		"/usr/share/man/man5/fared.yaml.5.gz", "/usr/share/man/man7/fared.7.gz"} {
		if !slices.Contains(inRPM, name) {
			t.Errorf("the rpm lacks %s", name)
		}
		if !strings.Contains(inDeb, " ."+name) {
			t.Errorf("the deb lacks %s", name)
		}
	}
	// The package of laboratories goes with the same version of fared, and has no file of the package fared.
	labRPM, labDeb := files["fared-lab-"+version+"-1."+arch+".rpm"], files["fared-lab_"+version+"-1_"+runtime.GOARCH+".deb"]
	inLab := strings.Fields(output(t, "rpm", "--query", "--list", "--package", labRPM))
	for _, name := range []string{"/usr/bin/fared-lab", "/usr/lib/systemd/system/fared-fleet.service", "/etc/default/fared-fleet", "/usr/share/man/man1/fared-lab.1.gz", "/usr/share/man/man1/fared-topo-generate.1.gz"} {
		if !slices.Contains(inLab, name) || !strings.Contains(output(t, "dpkg-deb", "--contents", labDeb), " ."+name) {
			t.Errorf("a package fared-lab lacks %s", name)
		}
	}
	for _, name := range inLab {
		if slices.Contains(inRPM, name) {
			t.Errorf("%s is in both packages", name)
		}
	}
	if out := output(t, "dpkg-deb", "--field", labDeb, "Depends"); strings.TrimSpace(out) != "fared (= "+version+"-1)" {
		t.Errorf("the deb fared-lab depends on %q", out)
	}
	if out := output(t, "rpm", "--query", "--requires", "--package", labRPM); !slices.Contains(strings.Split(out, "\n"), "fared = "+version+"-1") {
		t.Errorf("the rpm fared-lab requires %q", out)
	}
	if out := output(t, "rpm", "--checksig", "--nosignature", files["fared-"+version+"-1."+arch+".rpm"]); !strings.Contains(out, "digests OK") {
		t.Errorf("rpm --checksig: %s", out)
	}

	var bom struct {
		BOMFormat  string
		Components []struct{ Name string }
	}
	for _, program := range []string{"fared", "fared-lab", "fared-kube"} {
		data, err := os.ReadFile(files[program+"-"+version+"-linux-"+runtime.GOARCH+".cdx.json"])
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(data, &bom); err != nil || bom.BOMFormat != "CycloneDX" {
			t.Fatalf("the SBOM: %v, format %q", err, bom.BOMFormat)
		}
		// The program's modules as the Go toolchain lists them for this package.
		for module := range strings.Lines(output(t, "go", "list", "-deps", "-f", "{{with .Module}}{{if not .Main}}{{.Path}}{{end}}{{end}}", "../cmd/"+program)) {
			if module = strings.TrimSpace(module); module != "" && !slices.ContainsFunc(bom.Components, func(c struct{ Name string }) bool { return c.Name == module }) {
				t.Errorf("the SBOM of %s lacks %s", program, module)
			}
		}
	}

	var vex struct {
		Statements []struct {
			Products []struct {
				Subcomponents []struct {
					ID string `json:"@id"`
				}
			}
		}
	}
	data, err := os.ReadFile(files["fared-"+version+".openvex.json"])
	if err == nil {
		err = json.Unmarshal(data, &vex)
	}
	gobgp := output(t, "go", "list", "-m", "-f", "pkg:golang/{{.Path}}@{{.Version}}", "github.com/osrg/gobgp/v3")
	if err != nil || len(vex.Statements) < 8 || vex.Statements[0].Products[0].Subcomponents[0].ID != gobgp {
		t.Errorf("OpenVEX document: %v, %d statements, want more than 8 about %s", err, len(vex.Statements), gobgp)
	}

	// Docker loads an archive in OCI layout only with its containerd store, so the test reads the layout as any tool
	// would: by digests from the index on.
	dir := t.TempDir()
	output(t, "tar", "-x", "-f", files["fared-"+version+"-oci.tar"], "-C", dir)
	var manifest struct {
		Config struct{ Digest string }
		Layers []struct{ Digest string }
	}
	blob(t, dir, blobIndex(t, dir), &manifest)
	var config struct {
		Config struct{ Entrypoint []string }
	}
	blob(t, dir, manifest.Config.Digest, &config)
	if !slices.Equal(config.Config.Entrypoint, []string{"/usr/bin/fared"}) || len(manifest.Layers) != 1 {
		t.Errorf("the image has entry point %q and %d layers", config.Config.Entrypoint, len(manifest.Layers))
	}
	root := t.TempDir()
	output(t, "tar", "-x", "-z", "-f", filepath.Join(dir, "blobs", strings.Replace(manifest.Layers[0].Digest, ":", "/", 1)), "-C", root)
	for _, program := range []string{"fared", "fared-lab", "fared-kube"} {
		if out := output(t, filepath.Join(root, "usr/bin", program), "version"); !strings.Contains(out, "fared "+version+" ") {
			t.Errorf("the image's program %s prints version %q", program, out)
		}
	}
	if out := output(t, filepath.Join(root, "usr/bin/fared"), "topo", "show", "--example", "figure1"); out == "" {
		t.Error("the image's fared does not execute its fared-lab")
	}
}

// blobIndex returns the digest of the manifest for this architecture.
func blobIndex(t *testing.T, dir string) string {
	t.Helper()
	type index struct {
		Manifests []struct {
			Digest   string
			Platform struct{ Architecture string }
		}
	}
	var outer, inner index
	data, err := os.ReadFile(filepath.Join(dir, "index.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &outer); err != nil || len(outer.Manifests) != 1 {
		t.Fatalf("index.json: %v\n%s", err, data)
	}
	blob(t, dir, outer.Manifests[0].Digest, &inner)
	for _, m := range inner.Manifests {
		if m.Platform.Architecture == runtime.GOARCH {
			return m.Digest
		}
	}
	t.Fatalf("the index has no image for %s: %v", runtime.GOARCH, inner)
	return ""
}

// blob reads a blob and verifies its digest.
func blob(t *testing.T, dir, name string, into any) {
	t.Helper()
	file := filepath.Join(dir, "blobs", strings.Replace(name, ":", "/", 1))
	if got := "sha256:" + digest(t, file); got != name {
		t.Fatalf("blob %s has digest %s", name, got)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, into); err != nil {
		t.Fatal(err)
	}
}
