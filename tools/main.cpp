// SPDX-License-Identifier: Apache-2.0
// The uniep program: parses the command line and maps failures to exit codes: 0 ok, 1 a check
// failed, 2 bad arguments or input, 3 it cannot run here or the world failed.
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <new>

#include "base/error.hpp"
#include "commands.hpp"
#include "uniep/version.hpp"

namespace {

int report(const char* text, int code) {
  fmt::print(stderr, "uniep: {}\n", text);
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"The expert layer of Mixture-of-Experts models: the same bits on any schedule."};
  app.name("uniep");
  app.set_version_flag("--version", std::string("uniep ") + UNIEP_VERSION);
  app.require_subcommand(1);
  uniep::tools::Run run;
  uniep::tools::add_info(app, run);
  uniep::tools::add_case(app, run);
  uniep::tools::add_run(app, run);
  uniep::tools::add_verify(app, run);
  uniep::tools::add_bench(app, run);
  uniep::tools::add_trace(app, run);
  for (CLI::App* command : app.get_subcommands({})) {
    for (CLI::Option* option : command->get_options()) {
      option->multi_option_policy(CLI::MultiOptionPolicy::Throw);
    }
  }
  try {
    app.parse(argc, argv);
    return run();
  } catch (const CLI::Success& success) {
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    return report(fmt::format("{} (see uniep --help)", error.what()).c_str(), 2);
  } catch (const uniep::Error& error) {
    return report(error.what(), error.code() == uniep::ErrorCode::invalid_argument ? 2 : 3);
  } catch (const std::bad_alloc&) {
    return report("memory is not there for this size; use fewer tokens or a smaller shape", 3);
  } catch (const std::exception& error) {
    return report(error.what(), 3);
  }
}
