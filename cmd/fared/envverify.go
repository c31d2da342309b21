package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/internal/rdmadev"
	"github.com/fared/fared/internal/rdmaenv"
)

// verify runs a command in the environment of a program, and reports the RoCE packets that left by the planes
// meanwhile. It returns the exit code of the command, or cli.ExitFailed if there were none.
func (l *layout) verify(e *cli.Env, o *envOptions, program string, setup rdmaenv.Setup, report *rdmadev.Report, command []string) error {
	result, err := l.environment(program, setup)
	if err != nil {
		return err
	}
	path, err := findProgram(command[0])
	if err != nil {
		return err
	}
	before, err := report.SentPackets(o.sysfs)
	if err != nil {
		return cli.Exit(exitExec, err, "count packets at a leaf: tcpdump 'udp dst port 4791'")
	}
	variables := os.Environ()
	for _, v := range result.Variables {
		variables = append(variables, v.Name+"="+v.Value)
	}
	ended := runForeground(&exec.Cmd{Path: path, Args: command, Env: variables}, "")
	var exit cli.ProgramExit
	if ended != nil && !errors.As(ended, &exit) {
		return ended
	}
	after, err := report.SentPackets(o.sysfs)
	if err != nil {
		return cli.Failed(err, "the device was removed while the program ran")
	}
	sum, texts := uint64(0), []string{}
	for i, p := range after { // of the same report, so in the same order
		if p.Packets < before[i].Packets {
			return cli.Failed(fmt.Errorf("the packet counter of %s went back: its device was reset", p.Planes), "run the command again")
		}
		n := p.Packets - before[i].Packets
		sum += n
		texts = append(texts, fmt.Sprintf("%s %d", p.Planes, n))
	}
	if sum > 0 {
		fmt.Fprintf(e.Err, "fared env: RoCE packets that left by the planes: %s\n", strings.Join(texts, ", "))
		return ended
	}
	none := "no RoCE packet left by the planes: " + command[0] + " took another way, such as TCP or shared memory, or sent nothing"
	if ended != nil {
		fmt.Fprintf(e.Err, "fared env: %s\n", none)
		return ended
	}
	return cli.Failed(errors.New(none), "UCX_LOG_LEVEL=info, NCCL_DEBUG=INFO show the ways; 'fared rdma' names faults of the devices")
}
