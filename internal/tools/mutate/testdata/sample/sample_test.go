package sample

import "testing"

func TestChecked(t *testing.T) {
	for _, c := range [][3]int{{1, 2, 2}, {2, 1, 2}, {-1, -2, 0}} {
		if got := Checked(c[0], c[1]); got != c[2] {
			t.Errorf("Checked(%d, %d) = %d", c[0], c[1], got)
		}
	}
}

func TestSign(t *testing.T) {
	for a, want := range map[int]int{-5: -1, 0: 0, 7: 1} {
		if got := Sign(a); got != want {
			t.Errorf("Sign(%d) = %d", a, got)
		}
	}
}

func TestRan(t *testing.T) {
	Ran(1)
}
