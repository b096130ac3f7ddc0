//! The programs under BPF_PROG_TEST_RUN.
use aya::{Ebpf, EbpfLoader, programs::{SchedClassifier, Xdp}};
#[test]
fn every_program_loads() {
    let mut ebpf = EbpfLoader::new().load_file(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/bpf/thuban-programs.o")).unwrap();
    for name in ["xdp_pass", "agent_xdp", "transit_xdp"] {
        let p: &mut Xdp = ebpf.program_mut(name).unwrap().try_into().unwrap();
        if let Err(e) = p.load() { println!("{name}: {e:?}"); panic!("{name} {e}"); }
        println!("{name} {:?}", p.info().unwrap().verified_instruction_count());
    }
    for name in ["agent_tc", "transit_tc"] {
        let p: &mut SchedClassifier = ebpf.program_mut(name).unwrap().try_into().unwrap();
        if let Err(e) = p.load() { println!("{name}: {e:?}"); panic!("{name} {e}"); }
        println!("{name} {:?}", p.info().unwrap().verified_instruction_count());
    }
}
