package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/internal/testkit/binary"
)

// TestCompletionScripts checks that every shell has a script that calls fared for completions.
func TestCompletionScripts(t *testing.T) {
	for shell, mark := range map[string]string{
		"bash": "complete -o default -F __start_fared fared", "zsh": "#compdef fared", "fish": "complete -c fared", "powershell": "Register-ArgumentCompleter -CommandName 'fared'",
	} {
		script := must(t, "completion", shell)
		if !strings.Contains(script, mark) || !strings.Contains(script, "__complete") {
			t.Errorf("%s: not a script for fared:\n%.300s", shell, script)
		}
	}
}

// TestCompletionBash presses the tab key in bash and expects the objects of a running daemon.
func TestCompletionBash(t *testing.T) {
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Fatalf("%v: the tests of this project need bash", err)
	}
	self := executable(t)
	dir := t.TempDir()
	wrapper := fmt.Sprintf("#!%s\n%s=1 exec '%s' \"$@\"\n", bash, clitest.AsFared, self)
	if err := os.WriteFile(filepath.Join(dir, "fared"), []byte(wrapper), 0o755); err != nil {
		t.Fatal(err)
	}
	// The functions of the package bash-completion.
	const library = `_get_comp_words_by_ref() {
  words=("${COMP_WORDS[@]}"); cword=$COMP_CWORD; cur=${words[cword]}; prev=${words[cword-1]}
}
`
	press := func(words ...string) string {
		line := strings.Join(words, " ")
		quoted := "'" + strings.Join(words, "' '") + "'"
		script := library + must(t, "completion", "bash") + fmt.Sprintf(`
COMP_WORDS=(%s); COMP_CWORD=%d; COMP_LINE='%s'; COMP_POINT=%d; COMP_TYPE=9
__start_fared
printf '%%s\n' "${COMPREPLY[@]%%%% *}"
`, quoted, len(words)-1, line, len(line))
		cmd := exec.Command(bash, "--norc", "-c", script)
		cmd.Env = append(os.Environ(), "PATH="+dir+":"+filepath.Dir(binary.Lab(t))+":"+os.Getenv("PATH"))
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		return strings.Join(strings.Fields(string(out)), " ")
	}
	socket, _ := startFake(t)
	for _, test := range []struct{ words, want string }{
		{"drain plane ", "p1"},
		{"undrain plane ", "p0"},
		{"drain leaf ", "10.1.0.1 10.1.0.2"},
		{"drain sub-port p0", "p0.0 p0.1"},
		{"weights --destination ", "10.255.0.2/32"},
		{"weights --source ", "10.255.0.1/32"},
		{"lab --scenario s", "sub-cable"},
		{"topo gen", "generate"},
		{"help topo gen", "generate"},
		{"nup", "nupanet"},
	} {
		words := append([]string{"fared", "--socket", socket}, strings.Split(test.words, " ")...)
		if got := press(words...); got != test.want {
			t.Errorf("fared %s<TAB> offers %q, want %q", test.words, got, test.want)
		}
	}
}
