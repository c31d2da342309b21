package main

import (
	"fmt"
	"os"
	"testing"

	"github.com/fared/fared/cmd/internal/clitest"
)

// The helpers of clitest that most tests use.
var (
	execute, fared, must, refused, explains = clitest.Execute, clitest.Run, clitest.Must, clitest.Refused, clitest.Explains
	inBackground, start, within, executable = clitest.InBackground, clitest.Start, clitest.Within, clitest.Executable
)

const generous = clitest.Generous

func TestMain(m *testing.M) {
	clitest.Begin(newRoot, main)
	if dir := os.Getenv(asFaulty); dir != "" {
		if err := beFaulty(dir); err != nil {
			fmt.Fprintln(os.Stderr, "faulty:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if doors := os.Getenv(asStranger); doors != "" {
		if err := beStranger(doors); err != nil {
			fmt.Fprintln(os.Stderr, "stranger:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	clitest.Main(m)
}
