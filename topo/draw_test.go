package topo

import (
	"encoding/csv"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
)

// drawn parses an SVG and returns the number of elements of each name, and the texts.
func drawn(t *testing.T, text string) (elements map[string]int, texts map[string]bool) {
	t.Helper()
	elements, texts = map[string]int{}, map[string]bool{}
	dec := xml.NewDecoder(strings.NewReader(text))
	for {
		token, err := dec.Token()
		if errors.Is(err, io.EOF) {
			return elements, texts
		}
		if err != nil {
			t.Fatalf("no XML: %v\n%s", err, text)
		}
		switch e := token.(type) {
		case xml.StartElement:
			elements[e.Name.Local]++
		case xml.CharData:
			texts[strings.TrimSpace(string(e))] = true
		}
	}
}

// TestDraw verifies that the drawing of a small fabric shows every node and every
// cable, once.
func TestDraw(t *testing.T) {
	for _, s := range []Spec{{}, {Servers: 16, Leaves: 4, Spines: 4, GPUs: 8}, {Leaves: 2}, {Planes: 9, SubPorts: 1, Servers: 3}} {
		f, err := New(s)
		if err != nil {
			t.Fatal(err)
		}
		elements, texts := drawn(t, f.SVG())
		if elements["path"] != len(f.Cables) {
			t.Errorf("%s: %d lines for %d cables", f.Title(), elements["path"], len(f.Cables))
		}
		dot := f.Dot()
		if n := strings.Count(dot, " -- "); n != len(f.Cables) {
			t.Errorf("%s: %d edges for %d cables", f.Title(), n, len(f.Cables))
		}
		for _, n := range f.Nodes() {
			if !texts[n.Name] || !strings.Contains(dot, fmt.Sprintf("%q [", n.Name)) {
				t.Errorf("%s: %s is not drawn", f.Title(), n.Name)
			}
		}
	}
}

// TestDrawLarge verifies that equal nodes share one box, so that a drawing does not
// grow with the fabric.
func TestDrawLarge(t *testing.T) {
	for _, c := range []struct {
		spec  Spec
		lines int
		texts string
	}{
		{Spec{Servers: 64}, 8, "server1 … server64/× 64/leaf0/leaf3"},
		{Spec{Servers: 64, Leaves: 2, Spines: 8, Planes: 2}, 2*(2*2) + 2*2, "server1 … server32/server33 … server64/× 32/leaf1-1/spine0-0 … spine0-7/× 8 fared"},
		{Spec{Servers: 2048, GPUs: 8, Planes: 8, Leaves: 128, Spines: 16}, 8 * 3, "server1 … server2048/leaf7-0 … leaf7-127/spine7-0 … spine7-15/× 128 fared"},
	} {
		f, err := New(c.spec)
		if err != nil {
			t.Fatal(err)
		}
		elements, texts := drawn(t, f.SVG())
		if elements["path"] != c.lines {
			t.Errorf("%s: %d lines, not %d", f.Title(), elements["path"], c.lines)
		}
		for _, want := range strings.Split(c.texts, "/") {
			if !texts[want] {
				t.Errorf("%s: does not say %q: %v", f.Title(), want, texts)
			}
		}
		if n := strings.Count(f.Dot(), " -- "); n != c.lines {
			t.Errorf("%s: %d edges, not %d", f.Title(), n, c.lines)
		}
	}
}

// TestDrawAny verifies that the drawing of any fabric is XML, with nothing outside the
// view.
func TestDrawAny(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 10))
	for range 200 {
		f, err := New(randomSpec(rng))
		if err != nil {
			t.Fatal(err)
		}
		text := f.SVG()
		drawn(t, text)
		var width, height int
		if _, err := fmt.Sscanf(text[strings.Index(text, "viewBox"):], `viewBox="0 0 %d %d"`, &width, &height); err != nil {
			t.Fatal(err)
		}
		for _, part := range strings.Split(text, "<rect ")[1:] {
			var x, y, w, h int
			if _, err := fmt.Sscanf(part, `x="%d" y="%d" width="%d" height="%d"`, &x, &y, &w, &h); err != nil {
				continue // the background
			}
			if x < 0 || y < 0 || x+w > width || y+h > height {
				t.Fatalf("%+v: <rect %.60s is outside of %d x %d", f.Spec, part, width, height)
			}
		}
	}
}

// TestCabling verifies that both tables have a line for each cable, with equal
// content.
func TestCabling(t *testing.T) {
	f := example(t, "two-tier")
	rows, err := csv.NewReader(strings.NewReader(f.CablingCSV())).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	if len(rows) != 1+len(f.Cables) {
		t.Fatalf("%d rows for %d cables", len(rows), len(f.Cables))
	}
	if got, want := strings.Join(rows[1], ","), "p0,server1,p0.0,10.0.1.0/31,4200001000,leaf0-0,s1.0,10.0.1.1/31,4200010000,400G,a"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got, want := strings.Join(rows[len(rows)-1], ","), "p1,leaf1-1,up1,10.0.2.22/31,4200010003,spine1-1,down1,10.0.2.23/31,4200060001,800G,"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	lines := strings.Split(strings.TrimSuffix(f.CablingText(), "\n"), "\n")
	for i, line := range lines {
		got, want := strings.Join(strings.Fields(line), ","), strings.TrimSuffix(strings.Join(rows[i], ","), ",")
		if i == 0 {
			want = strings.ToUpper(want)
		}
		if got != want || strings.HasSuffix(line, " ") {
			t.Errorf("line %d: %q, and in the CSV %q", i+1, line, want)
		}
	}
	if strings.Contains((&Fabric{Spec: f.Spec}).CablingText(), "p0") {
		t.Error("cables where there are none")
	}
}
