package main

import (
	"bufio"
	"net/http"
	"strings"
	"testing"

	"github.com/fared/fared/cmd/internal/cli"
)

// TestLabUI checks that the lab's page is served at the address that the command prints, that a request for a cable has
// its effect, and the end of the command.
func TestLabUI(t *testing.T) {
	b := inBackground(t, "lab", "--ui", "127.0.0.1:0", "--planes", "2", "--servers", "2", "--quick")
	line := b.Until(t, "the page is http://127.0.0.1:")
	_, rest, _ := strings.Cut(line, "the page is ")
	address, _, _ := strings.Cut(rest, ",")
	resp, err := http.Get(address + "lab/events")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	posted, err := http.Post(address+"lab/cables", "application/json", strings.NewReader(`{"cables": [0], "cut": true}`))
	if err != nil {
		t.Fatal(err)
	}
	posted.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() && !strings.Contains(lines.Text(), `"text":"cut server1 p0.0","ok":true`) {
	}
	if posted.StatusCode != http.StatusAccepted || !strings.Contains(lines.Text(), `"cables":{"0":"cut"}`) || !strings.Contains(lines.Text(), `"plane":"p0","up":3,"cables":4`) {
		t.Errorf("%d, then %s, %v", posted.StatusCode, lines.Text(), lines.Err())
	}
	b.Stop()
	if code := <-b.Code; code != cli.ExitOK {
		t.Errorf("the command ends with %d: %s", code, b.Err)
	} else {
		b.Code <- code
	}
	for _, args := range [][]string{{"--ui", "0.0.0.0:0"}, {"--ui", "nonsense"}, {"--ui", "127.0.0.1:0", "--scenario", "leaf"}} {
		if o := fared(t, append([]string{"lab"}, args...)...); o.Code != cli.ExitUsage || o.Err == "" {
			t.Errorf("%q: exit code %d: %s", args, o.Code, o.Err)
		}
	}
}
