//! What the documentation shows is what the program prints.

#[test]
fn transcripts_are_real() {
    trycmd::TestCases::new().case("README.md").env("COLUMNS", "100").env("NO_COLOR", "1").env("LANG", "C.UTF-8").run();
}
