package fare

import "testing"

// TestPrepended has paths as they arrive at a server behind a leaf of AS 65100.
func TestPrepended(t *testing.T) {
	for _, x := range []struct {
		name string
		path []uint32
		want bool
	}{
		{"plain", []uint32{65100, 65001}, false},
		{"over a spine", []uint32{65100, 65200, 65101, 65001}, false},
		{"once by the leaf", []uint32{65100, 65100, 65001}, true},
		{"three times by the leaf", []uint32{65100, 65100, 65100, 65100, 65001}, true},
		{"twice by the far leaf", []uint32{65100, 65200, 65101, 65101, 65101, 65001}, true},
		{"twice by the origin", []uint32{65100, 65001, 65001, 65001}, true},
		{"as-override at the far leaf", []uint32{65100, 65200, 65101, 65101}, false},
		{"as-override at a spine between leaves of one AS", []uint32{65100, 65200, 65200, 65001}, false},
		{"as-override at the leaf, both servers behind it", []uint32{65100, 65100}, false},
		{"private numbers replaced by the leaf's", []uint32{65100, 65100, 65100, 65100}, false},
		{"empty", nil, false},
	} {
		if got := prepended(x.path, 65100); got != x.want {
			t.Errorf("%s: %v prepended %v, want %v", x.name, x.path, got, x.want)
		}
	}
}
