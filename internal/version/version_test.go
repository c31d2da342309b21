package version

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"strings"
	"testing"
)

const root = "../.."

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestString checks the version with and without a record of the commit.
func TestString(t *testing.T) {
	revision := debug.BuildSetting{Key: "vcs.revision", Value: "c111131a2b3c4d5e6f708192a3b4c5d6e7f80910"}
	plain := strings.TrimSpace(read(t, "VERSION"))
	for _, test := range []struct {
		settings []debug.BuildSetting
		want     string
	}{
		{nil, plain},
		{[]debug.BuildSetting{{Key: "vcs", Value: "git"}, revision, {Key: "vcs.modified", Value: "false"}}, plain + "+c111131a2b3c"},
		{[]debug.BuildSetting{revision, {Key: "vcs.modified", Value: "true"}}, plain + "+c111131a2b3c-dirty"},
		{[]debug.BuildSetting{{Key: "vcs.revision", Value: "c1"}}, plain + "+c1"},
	} {
		if got := withCommit(test.settings); got != test.want {
			t.Errorf("settings %v: %q, want %q", test.settings, got, test.want)
		}
	}
}

// TestOneVersion checks that the file VERSION of the root folder, the header of libfared and the chart have the version
// of the programs.
func TestOneVersion(t *testing.T) {
	want := strings.TrimSpace(number)
	if !regexp.MustCompile(`^\d+\.\d+\.\d+$`).MatchString(want) || number != want+"\n" {
		t.Errorf("VERSION has %q, want a version such as 0.1.0 and a line feed", number)
	}
	if got := read(t, "VERSION"); got != number {
		t.Errorf("VERSION has %q and internal/version/VERSION %q: the first must be a link to the second", got, number)
	}
	if define := fmt.Sprintf("\n#define FARED_VERSION %q\n", want); !strings.Contains(read(t, "lib/include/fared.h"), define) {
		t.Errorf("lib/include/fared.h lacks %q", strings.TrimSpace(define))
	}
	for _, key := range []string{"version", "appVersion"} {
		if line := fmt.Sprintf("\n%s: %s\n", key, want); !strings.Contains(read(t, "charts/fared/Chart.yaml"), line) {
			t.Errorf("charts/fared/Chart.yaml lacks %q", strings.TrimSpace(line))
		}
	}
}

// section returns the lines of a section of the changelog without empty ones, and whether the section exists.
func section(changelog, title string) (lines []string, ok bool) {
	for line := range strings.Lines(changelog) {
		line = strings.TrimSuffix(line, "\n")
		if strings.HasPrefix(line, "## ") {
			if ok {
				break
			}
			ok = line == "## "+title
		} else if ok && line != "" {
			lines = append(lines, line)
		}
	}
	return lines, ok
}

// faults returns the violations of the rules of CHANGELOG.md: a section for the version, of at most 40 lines in 0.1.0,
// and Unreleased with entries of one line of at most 200 characters.
func faults(changelog, version string) (out []string) {
	if _, ok := section(changelog, version); !ok {
		out = append(out, fmt.Sprintf("no section %q for the file VERSION", "## "+version))
	}
	if first, _ := section(changelog, "0.1.0"); len(first) > 40 {
		out = append(out, fmt.Sprintf("the section 0.1.0 has %d lines, at most 40 are permitted", len(first)))
	}
	unreleased, ok := section(changelog, "Unreleased")
	if !ok {
		out = append(out, "no section Unreleased")
	}
	for _, line := range unreleased {
		if n := len([]rune(line)); n > 200 || !strings.HasPrefix(line, "- ") {
			out = append(out, fmt.Sprintf("Unreleased: a line of %d characters, want \"- \" and one line of at most 200 for each change: %s", n, line))
		}
	}
	return out
}

// TestChangelog checks CHANGELOG.md, and that each broken rule is found.
func TestChangelog(t *testing.T) {
	for _, fault := range faults(read(t, "CHANGELOG.md"), strings.TrimSpace(number)) {
		t.Errorf("CHANGELOG.md: %s", fault)
	}
	const good = "# Changelog\n\n## Unreleased\n- a\n\n## 0.2.0\n- b\n\n## 0.1.0\n"
	for _, test := range []struct{ changelog, want string }{
		{good + strings.Repeat("- line\n\n", 40), ""},
		{good + strings.Repeat("- line\n", 41), "41 lines"},
		{strings.Replace(good, "0.2.0", "0.2.1", 1), `no section "## 0.2.0"`},
		{strings.Replace(good, "Unreleased", "unreleased", 1), "no section Unreleased"},
		{strings.Replace(good, "- a", "- "+strings.Repeat("ä", 198), 1), ""},
		{strings.Replace(good, "- a", "- "+strings.Repeat("ä", 199), 1), "201 characters"},
		{strings.Replace(good, "- a", "- a\n  b", 1), "for each change:   b"},
	} {
		got := strings.Join(faults(test.changelog, "0.2.0"), "; ")
		if test.want == "" && got != "" || !strings.Contains(got, test.want) {
			t.Errorf("%q: faults %q, want %q", test.changelog, got, test.want)
		}
	}
}

// TestReleaseScript checks that scripts/release.sh refuses a tag that differs from VERSION, and a changelog without a
// section or with lines that belong to no version.
func TestReleaseScript(t *testing.T) {
	git, err := exec.LookPath("git")
	if err != nil {
		t.Skip("git is missing")
	}
	script := read(t, "scripts/release.sh")
	for _, test := range []struct{ tag, version, changelog, want string }{
		{"", "1.2.3", "## 1.2.3", "no tag such as v"},
		{"v1.2.4", "1.2.3", "## 1.2.3", "the tag v1.2.4 differs from the file VERSION, which has 1.2.3"},
		{"v1.2.3", "1.2.3", "## Unreleased", `CHANGELOG.md has no section "## 1.2.3"`},
		{"v1.2.3", "1.2.3", "## Unreleased\n\n- A line.\n\n## 1.2.3\n\n- Another.", "CHANGELOG.md has lines under Unreleased"},
	} {
		dir := t.TempDir()
		if err := os.Mkdir(filepath.Join(dir, "scripts"), 0o755); err != nil {
			t.Fatal(err)
		}
		for file, text := range map[string]string{"scripts/release.sh": script, "VERSION": test.version + "\n", "CHANGELOG.md": test.changelog + "\n"} {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		run := func(name string, args ...string) (string, error) {
			cmd := exec.Command(name, args...)
			cmd.Dir = dir
			cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null")
			out, err := cmd.CombinedOutput()
			return string(out), err
		}
		commands := [][]string{{"init", "-q"}, {"add", "."}, {"-c", "user.name=a", "-c", "user.email=a@b.invalid", "commit", "-q", "-m", "a"}}
		if test.tag != "" {
			commands = append(commands, []string{"tag", test.tag})
		}
		for _, args := range commands {
			if out, err := run(git, args...); err != nil {
				t.Fatalf("git %v: %v\n%s", args, err, out)
			}
		}
		if out, err := run("bash", "scripts/release.sh"); err == nil || !strings.Contains(out, test.want) {
			t.Errorf("tag %q, VERSION %s, changelog %q: %v, %q, want %q", test.tag, test.version, test.changelog, err, out, test.want)
		}
	}
}
