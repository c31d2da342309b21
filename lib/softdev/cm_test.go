package softdev

import (
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
)

// TestCommunicationManagement connects and disconnects two devices in virtual time, on a wire that loses, duplicates, delays and changes messages.
func TestCommunicationManagement(t *testing.T) {
	program := compile(t, "cm_unit", []string{memorySanitizers}, "src/cm.c")
	rounds := 2000
	if os.Getenv("FARED_OPERATIONS") != "" {
		rounds = 100000
	}
	for _, loss := range []string{"0", "100", "300"} {
		t.Log(run(t, program, fmt.Sprint(rand.Uint32()), fmt.Sprint(rounds), loss))
	}
}
